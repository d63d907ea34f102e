"""safetensors files, including bfloat16: read with the `safetensors` package, written with it or as a stream.

The package checks a header against the file before it allocates anything: types, shapes, sizes that overflow, and
tensors that overlap, leave holes or lie beyond the end. It reads one tensor at a time, with pread, so that a file that
is cut off meanwhile is an error instead of ending the process. It can only write tensors that are all in memory;
`write_safetensors` writes a model tensor by tensor as it comes from the device.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from wgrad.device.errors import WgradError
from wgrad.device.files import atomic_file, write_bytes
from wgrad.train.files.decode import FETCH
from wgrad.train.files.input_files import one_line, open_input, reading, refuse_lfs_pointer

_NAMES = {
    np.dtype(kind): name
    for name, kind in {
        "F64": "<f8",
        "F32": "<f4",
        "F16": "<f2",
        "BF16": ml_dtypes.bfloat16,
        "I64": "<i8",
        "I32": "<i4",
        "I16": "<i2",
        "I8": "i1",
        "U8": "u1",
        "U32": "<u4",
        "BOOL": "?",
    }.items()
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ITEMSIZES = {name: dtype.itemsize for dtype, name in _NAMES.items()}
_OCTETS = ("F8_E4M3", "F8_E8M0")  # the package returns no arrays of these
_PIECE = 1 << 17  # values that are checked together
_METADATA = {"format": "pt"}  # transformers refuses files without it


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file. `dtype` is the file's name of it (F32, BF16, ...)."""

    source: str  # the option that named the file
    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    _file: Any = field(repr=False, compare=False)  # safetensors' open file
    begin: int | None = field(repr=False, compare=False)  # offset of its bytes in the file; None: unknown

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor; -1 for an unsupported dtype (6-bit floats and the like)."""
        if self.dtype in _OCTETS:
            return math.prod(self.shape)
        return _ITEMSIZES[self.dtype] * math.prod(self.shape) if self.dtype in _ITEMSIZES else -1

    def array(self) -> np.ndarray:
        """Read the tensor in its own dtype.

        Raises:
            WgradError: NumPy lacks the dtype, or the file was cut off meanwhile.
        """
        if self.dtype not in _ITEMSIZES:
            known = ", ".join(_ITEMSIZES)
            name = one_line(self.name)
            raise WgradError(f"{self.source}: {name} in {self.path} is {self.dtype}: only {known} can be read")
        with _explained(self.path, self.source):
            values: np.ndarray = self._file.get_tensor(self.name)
            return values

    def octets(self) -> np.ndarray:
        """Return the bytes of a tensor of 8-bit floats as uint8 in its shape. Raises as `array`."""
        if self.begin is None:  # after a tensor of unknown size
            return self.array()
        return np.frombuffer(self._bytes(0, self.nbytes), np.uint8).reshape(self.shape)

    def octet_blocks(self, rows: int) -> Iterator[np.ndarray]:
        """Yield `octets` in pieces of `rows` rows. Raises as `array`."""
        if self.begin is None:
            yield self.array()
            return
        width = math.prod(self.shape[1:])
        for begin in range(0, self.shape[0], rows):
            count = min(rows, self.shape[0] - begin)
            yield np.frombuffer(self._bytes(begin * width, count * width), np.uint8).reshape(count, *self.shape[1:])

    def read_into(self, out: np.ndarray, start: int) -> None:
        """Fill a flat array of the tensor's float dtype with its elements from `start` on. Needs `begin`.

        Raises as `finite_array`.
        """
        assert self.begin is not None
        left, at = out.view(np.uint8).data, self.begin + start * out.itemsize
        with _explained(self.path, self.source), open(self.path, "rb", buffering=0) as file:
            file.seek(at)
            while left:
                count = file.readinto(left)
                if not count:
                    raise ValueError(f"it ends within {self.name}")
                left = left[count:]
        self.check_finite(out)

    def finite_array(self) -> np.ndarray:
        """Return `array`, of a float dtype. Raises WgradError if a value is infinite or NaN."""
        return self.check_finite(self.array())

    def check_finite(self, array: np.ndarray) -> np.ndarray:
        """Check a float array of this tensor's values, and return it. Raises as `finite_array`."""
        if not _is_finite(array):
            name = one_line(self.name)
            raise WgradError(
                f"{self.source}: {name} in {self.path} has values that are not finite (NaN or infinity), with which "
                "nothing can be computed: fetch the file again, or take another version of it"
            )
        return array

    def blocks(self, rows: int) -> Iterator[np.ndarray]:
        """Yield the tensor [n, ...] in pieces of `rows` rows, only one of which is in memory. Raises WgradError."""
        dtype, width = _DTYPES[self.dtype], math.prod(self.shape[1:])
        for begin in range(0, self.shape[0], rows):
            count = min(rows, self.shape[0] - begin)
            data = self._bytes(begin * width * dtype.itemsize, count * width * dtype.itemsize)
            yield np.frombuffer(data, dtype).reshape(count, *self.shape[1:])

    def _bytes(self, at: int, size: int) -> bytes:
        """Return `size` bytes of the tensor from `at` on, without parsing the header again. Raises WgradError."""
        with _explained(self.path, self.source):
            if self.begin is None:
                result: bytes = self._file.get_tensor(self.name).tobytes()[at : at + size]
                return result
            with open(self.path, "rb", buffering=0) as file:
                file.seek(self.begin + at)
                data = file.read(size)
            if len(data) < size:
                raise ValueError(f"it ends within {self.name}")
            return data

    def sample(self, count: int, size: int) -> list[bytes]:
        """Return `count` blocks of about `size` bytes, evenly spaced from the beginning to the end of the tensor.

        A tensor that is not larger is read whole; one of an unsupported dtype gives none.
        """
        if self.nbytes < 0:
            return []
        if self.nbytes <= count * size:
            return [self._bytes(0, self.nbytes)]
        itemsize = _ITEMSIZES.get(self.dtype, 1)
        window = _windows(self.shape, size // itemsize)
        places = [window(number / (count - 1)) for number in range(count)]
        return [self._bytes(first * itemsize, length * itemsize) for first, length in places]


def _is_finite(array: np.ndarray) -> bool:
    """Return whether no number of a float16, bfloat16 or float32 array is NaN or infinite.

    The bits of these are the largest integers, for either sign. Finding the largest integer of pieces that fit into the
    cache takes a tenth of the time of np.isfinite.
    """
    unsigned, signed = (np.uint16, np.int16) if array.itemsize == 2 else (np.uint32, np.int32)
    bits = np.array([np.inf, -np.inf], array.dtype).view(unsigned)
    flat = array.reshape(-1).view(unsigned)
    pieces = (flat[start : start + _PIECE] for start in range(0, flat.size, _PIECE))
    return all(piece.view(signed).max() < bits[0] and piece.max() < bits[1] for piece in pieces)


def _windows(shape: tuple[int, ...], elements: int) -> Callable[[float], tuple[int, int]]:
    """Return a function from a place (0: beginning, 1: end) to the first of at most `elements` consecutive elements
    there, and their number."""
    widths: list[int] = []
    for length in reversed(shape):
        widths.insert(0, max(1, min(length, elements)))
        elements //= widths[0]

    def at(place: float) -> tuple[int, int]:
        first = 0
        for length, width in zip(shape, widths):
            first = first * length + int(place * (length - width))
        return first, math.prod(widths)

    return at


@contextmanager
def _explained(path: Path, source: str) -> Iterator[None]:
    """Turn errors of the package about a file into WgradError."""
    try:
        yield
    except (SafetensorError, OSError, ValueError) as error:  # ValueError: NumPy, for a shape that it cannot have
        reason = one_line(str(error).removeprefix("Error while deserializing header: "))
        raise WgradError(f"{source}: {path} is cut off or damaged ({reason}): {FETCH}") from error


def read_entries(path: str | os.PathLike[str], source: str) -> dict[str, TensorEntry]:
    """Return the tensors of a file by name. source: the option that named it, which begins each error.

    Raises:
        WgradError: the file is missing, not a regular file, truncated, a pointer of Git LFS, or not safetensors.
    """
    path = Path(path)
    with open_input(path, source) as file, reading(path, source):
        refuse_lfs_pointer(file.read(64), path, source)
    with _explained(path, source):
        opened: Any = safe_open(path, "numpy", backend="pread")
        entries = {}
        with open(path, "rb") as file:
            begin: int | None = 8 + int.from_bytes(file.read(8), "little")  # behind the header
        # The package has checked that tensors are consecutive, without holes.
        for name in opened.offset_keys():
            part = opened.get_slice(name)
            entry = TensorEntry(source, path, name, part.get_dtype(), tuple(part.get_shape()), opened, begin)
            entries[name] = entry
            begin = None if begin is None or entry.nbytes < 0 else begin + entry.nbytes
    return entries


# ---- writing -----------------------------------------------------------------------------------
def save_arrays(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays atomically; this takes their memory once more. Raises WgradError, as for a full disk."""
    write_bytes(path, save({name: np.asarray(a, order="C") for name, a in arrays.items()}, _METADATA))


@dataclass(frozen=True)
class TensorSource:
    """A tensor to be written. `fetch` is called when its turn comes, so that only one is in memory."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], np.ndarray]


def from_arrays(arrays: Mapping[str, np.ndarray]) -> list[TensorSource]:
    """Return arrays in memory as sources."""

    def source(name: str, array: np.ndarray) -> TensorSource:
        return TensorSource(name, array.dtype, array.shape, lambda: array)

    return [source(name, array) for name, array in arrays.items()]


def write_safetensors(path: str | os.PathLike[str], tensors: Iterable[TensorSource]) -> None:
    """Write a file atomically, tensor by tensor. After a WgradError, as for a full disk, `path` is unchanged.

    Format: 8 bytes little-endian length of a JSON header {name: {dtype, shape, data_offsets}}, then the data
    (https://github.com/huggingface/safetensors).
    """
    tensors = list(tensors)
    header: dict[str, Any] = {"__metadata__": _METADATA}
    at = 0
    for tensor in tensors:
        size = int(np.prod(tensor.shape, dtype=np.int64)) * tensor.dtype.itemsize
        header[tensor.name] = {
            "dtype": _NAMES[np.dtype(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins aligned
    with atomic_file(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors:
            value = np.asarray(tensor.fetch(), tensor.dtype, order="C")  # which keeps the shape ()
            if value.shape != tuple(tensor.shape):
                raise ValueError(f"{tensor.name}: expected {tensor.shape}, got {value.shape}")
            file.write(value.reshape(-1).view(np.uint8).data)
