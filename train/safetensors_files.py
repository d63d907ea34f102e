"""safetensors files read tensor by tensor and written tensor by tensor, bfloat16 included.

Format: 8 bytes little-endian length of a JSON header {name: {dtype, shape, data_offsets}}, then the data
(https://github.com/huggingface/safetensors). Reading maps the file: a tensor costs memory only while
it is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from wgrad.autograd.errors import WgradError
from wgrad.train.files import atomic_file

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": BFLOAT16,
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "U32": np.dtype("<u4"),
    "BOOL": np.dtype("?"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER = 100 << 20  # as in the reference implementation


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies. `dtype` is the file's own word (F32, BF16, ...); begin and end are absolute byte offsets."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def raw(self) -> np.ndarray:
        """The bytes, uint8 [end - begin], mapped from the file."""
        if self.begin == self.end:
            return np.empty(0, np.uint8)
        return np.memmap(self.path, np.uint8, "r", self.begin, (self.end - self.begin,))

    def array(self) -> np.ndarray:
        """The tensor in its own dtype, mapped from the file. KeyError for a dtype that NumPy lacks."""
        return self.raw().view(_DTYPES[self.dtype]).reshape(self.shape)


def read_entries(path: str | os.PathLike[str], source: str) -> dict[str, TensorEntry]:
    """Header of one file -> its tensors. `source` (the option that named it) opens each error.

    Raises WgradError: missing, truncated, or not a safetensors file.
    """
    path = Path(path)
    again = "fetch the file again"
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise WgradError(
                    f"{source}: {path} is cut off or not a safetensors file ({size} bytes, header of {length}): {again}"
                )
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise WgradError(f"{source}: {path} is missing: {again}") from None
    except OSError as error:
        raise WgradError(f"{source}: cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise WgradError(f"{source}: the header of {path} is not JSON: {again}") from error
    entries, base = {}, 8 + length
    try:
        for name, info in header.items():
            if name != "__metadata__":
                entries[name] = _entry(path, info, base)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WgradError(f"{source}: the header of {path} is damaged ({error}): {again}") from error
    needed = max((entry.end for entry in entries.values()), default=base)
    if needed > size:
        raise WgradError(f"{source}: {path} is cut off: {size} bytes of {needed}: {again}")
    return entries


def _entry(path: Path, info: Mapping[str, Any], base: int) -> TensorEntry:
    begin, end = (int(v) for v in info["data_offsets"])
    entry = TensorEntry(path, str(info["dtype"]), tuple(int(n) for n in info["shape"]), base + begin, base + end)
    if entry.dtype in _DTYPES:
        expected = int(np.prod(entry.shape, dtype=np.int64)) * _DTYPES[entry.dtype].itemsize
        if begin < 0 or end - begin != expected:
            raise ValueError(f"{end - begin} bytes for {entry.dtype} {list(entry.shape)}")
    return entry


@dataclass(frozen=True)
class TensorSource:
    """A tensor to be written: `fetch` is called when its turn comes, so that only one stands in memory."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], np.ndarray]


def from_arrays(arrays: Mapping[str, np.ndarray]) -> list[TensorSource]:
    """Arrays that are in memory already, as sources."""

    def source(name: str, array: np.ndarray) -> TensorSource:
        return TensorSource(name, array.dtype, array.shape, lambda: array)

    return [source(name, array) for name, array in arrays.items()]


def write_safetensors(
    path: str | os.PathLike[str], tensors: Iterable[TensorSource], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a file atomically. WgradError where the disk is full and the like; `path` is then as it was."""
    tensors = list(tensors)
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    at = 0
    for tensor in tensors:
        count = int(np.prod(tensor.shape, dtype=np.int64)) * tensor.dtype.itemsize
        offsets = [at, at + count]
        header[tensor.name] = {
            "dtype": _NAMES[np.dtype(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        at += count
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins aligned
    with atomic_file(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors:
            value = np.ascontiguousarray(tensor.fetch(), tensor.dtype)
            if value.shape != tuple(tensor.shape):
                raise ValueError(f"{tensor.name}: expected {tensor.shape}, got {value.shape}")
            file.write(value.reshape(-1).view(np.uint8).data)
