"""Weights of a GGUF file, by their names in Hugging Face's files.

The `gguf` package reads the header; tensors are read at their offsets. llama.cpp's converter reorders the rows of each
head of q and k into pairs for its rotary embedding; here they are put back into halves.
Source: github.com/ggml-org/llama.cpp, gguf-py and convert_hf_to_gguf.py (LlamaModel).
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from wgrad.device.contract import Device
from wgrad.device.errors import WgradError
from wgrad.device.formats.frozen_weight import FrozenWeight, gguf_formats
from wgrad.train.files.decode import FETCH, show
from wgrad.train.files.gguf_names import ARCHITECTURES, NORMS_OF_FALCON, QKV, hugging_face_name
from wgrad.train.files.gguf_splits import all_parts, check_part, check_tensors, is_split
from wgrad.train.files.gguf_traits import traits_of
from wgrad.train.files.input_files import one_line, open_input, reading, refuse_lfs_pointer
from wgrad.train.files.safetensors_files import TensorEntry

_DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
_DECODED = ("token_embd", "output", "per_layer_token_embd")  # always decoded, since their rows are looked up
_VERSIONS = (2, 3)
_UNKNOWN_TYPE = re.compile(r"(\d+)\)? is not a valid GGMLQuantizationType")


# ---- rows of q and k: halves of a head one after the other (Hugging Face), or pair by pair (GGUF) ---------------
def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows [heads * head_dim, n] from Hugging Face's order to GGUF's."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows from GGUF's order to Hugging Face's, the inverse of `permute`."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def require_gguf(option: str, path: object) -> Any:
    """Return the `gguf` package. Raises WgradError if it is not installed."""
    try:
        import gguf
    except ImportError:
        raise WgradError(f"{option}: {path} is a GGUF file, which takes a package: pip install 'wgrad[gguf]'") from None
    return gguf


@dataclass(frozen=True)
class GgufEntry(TensorEntry):
    """A tensor in a GGUF file.

    stored: the file's type (F32, BF16, Q8_0, ...). dtype: the same, or F32 if `array` decodes it.
    heads: the number of heads whose rows are reordered; 0: none.
    """

    stored: str
    offset: int
    size: int
    heads: int

    @property
    def nbytes(self) -> int:
        return self.size

    def _read(self, at: int, size: int) -> np.ndarray:
        with reading(self.path, self.source):
            data = np.fromfile(self.path, np.uint8, size, offset=self.offset + at)
        if data.size != size:
            raise WgradError(f"{self.source}: {self.path} is cut off: {FETCH}")
        return data

    def row_bytes(self) -> np.ndarray:
        """Return uint8 [rows, bytes of a row], in Hugging Face's order of rows."""
        count = math.prod(self.shape[:-1]) if len(self.shape) > 1 else self.shape[0]
        rows = self._read(0, self.size).reshape(count, -1)
        return np.ascontiguousarray(unpermute(rows, self.heads) if self.heads else rows)

    def array(self) -> np.ndarray:
        if self.stored in gguf_formats():
            weight = self._frozen(self.row_bytes())
            return weight.rows(0, weight.shape[0], _DTYPES["F32"]).reshape(self.shape)
        values: np.ndarray = self.row_bytes().view(_DTYPES[self.stored]).reshape(self.shape)
        return values

    def _frozen(self, rows: np.ndarray) -> FrozenWeight:
        return gguf_formats()[self.stored].from_gguf(rows, (rows.shape[0], self.shape[-1]))

    def upload_frozen(self, device: Device, contents: bool) -> FrozenWeight:
        """Upload the weight in its format. contents: False reads nothing, for a dry run.

        Raises:
            WgradError: a scale is not finite.
        """
        rows = (
            self.row_bytes()
            if contents
            else np.zeros((math.prod(self.shape[:-1]), self.size // math.prod(self.shape[:-1])), np.uint8)
        )
        weight = self._frozen(rows)
        for part in weight.finite_parts():
            self.check_finite(part)
        return weight.map_arrays(device.upload)

    def blocks(self, rows: int) -> Iterator[np.ndarray]:
        array = self.array()
        for begin in range(0, self.shape[0], rows):
            yield array[begin : begin + rows]

    def sample(self, count: int, size: int) -> list[bytes]:
        if self.size <= count * size:
            return [self._read(0, self.size).tobytes()]
        return [self._read(number * (self.size - size) // (count - 1), size).tobytes() for number in range(count)]


def is_frozen_gguf(entry: TensorEntry | None) -> bool:
    """Return whether a tensor has a quantized format that linear layers take without decoding."""
    return isinstance(entry, GgufEntry) and entry.dtype in gguf_formats()


def read_gguf_entries(path: Path, source: str) -> dict[str, TensorEntry]:
    """Return the tensors of a file, or of all parts of a split one. source: the option, which begins each error.

    Raises:
        WgradError: the file is missing, not a regular file, cut off or damaged, a pointer of Git LFS, or of an unknown
            architecture; its parts do not belong together; or the `gguf` package is not installed.
    """
    parts = _open_parts(path, source)
    first, entries = parts[0].fields, dict[str, TensorEntry]()
    for part in parts:
        for name, entry in _entries(part.reader, part.path, source, first).items():
            if name in entries:
                raise WgradError(
                    f"{source}: {part.path} has {one_line(name)}, as {entries[name].path.name} does: {FETCH}"
                )
            entries[name] = entry
    check_tensors(parts[0].path, sum(len(part.reader.tensors) for part in parts), first, source)
    shared, own, of_mlp = NORMS_OF_FALCON
    if any(own in name for name in entries):
        entries = {name.replace(shared, of_mlp): entry for name, entry in entries.items()}
    return entries


def gguf_parts(path: Path, source: str) -> list[Path]:
    """Return the files of a model: the given one, or all parts of a split model. Raises as `read_gguf_entries`."""
    return [part.path for part in _open_parts(path, source)]


class _Part(NamedTuple):
    """A file of a model, and its header."""

    path: Path
    reader: Any
    fields: dict[str, Any]


def _open_parts(path: Path, source: str) -> list[_Part]:
    """Open the files of a model in order, each once, since parsing a header takes long."""
    reader = open_reader(path, source)
    given = _Part(path, reader, _fields(reader, path, source))
    if not is_split(given.fields):
        return [given]
    parts = []
    files = all_parts(path, given.fields["split.count"], source)
    for number, file in enumerate(files, start=1):
        if file == path:
            part = given
        else:
            reader = open_reader(file, source)
            part = _Part(file, reader, _fields(reader, file, source))
        check_part(file, part.fields, number, len(files), source)
        parts.append(part)
    return parts


def _fields(reader: Any, path: Path, source: str) -> dict[str, Any]:
    """Return keys and values, without those of the tokenizer."""
    with _damage(path, source):
        return {name: _contents(reader, f) for name, f in reader.fields.items() if not name.startswith("tokenizer.")}


def _contents(reader: Any, field: Any) -> Any:
    """Return the value of a key; nothing for arrays of texts."""
    kind = field.types[-1]
    if len(field.types) > 1 and kind in reader.gguf_scalar_to_np:
        return field.parts[-1].view(reader.gguf_scalar_to_np[kind]).tolist()
    return field.contents()


def _entries(reader: Any, path: Path, source: str, fields: dict[str, Any]) -> dict[str, TensorEntry]:
    """Return the tensors of one file. fields: metadata of the model's first file."""
    architecture = fields.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise WgradError(
            f"{source}: {path}: general.architecture {show(architecture)} is not read from GGUF: use the model in "
            f"safetensors, or one of the {len(ARCHITECTURES)} architectures that docs/reference/models.md lists"
        )
    names, traits = ARCHITECTURES[architecture], traits_of(architecture)
    heads = _heads(architecture, fields, path, source) if traits.paired or traits.stacks_qkv else {}
    entries: dict[str, TensorEntry] = {}
    _refuse_types(reader, path, source)
    alignment = int(reader.alignment)
    expected = int(reader.data_offset)  # as ggml: each tensor begins where the one before ends, so that none overlap
    for tensor in reader.tensors:
        if tensor.data_offset != expected:
            raise WgradError(
                f"{source}: {path}: {one_line(tensor.name)} must begin at byte {expected}, after the tensor before it, "
                f"got {tensor.data_offset}: {FETCH}"
            )
        expected += -(-int(tensor.n_bytes) // alignment) * alignment
        shape = tuple(int(n) for n in reversed(tensor.shape))
        stored, place = tensor.tensor_type.name, int(tensor.data_offset)
        for stands_for, own, size in _parts(tensor.name, shape, int(tensor.n_bytes), names, heads):
            name, part = hugging_face_name(stands_for, names)
            turned = heads.get(part, 0) if traits.paired else 0
            if turned and own[0] % (2 * turned):
                raise WgradError(f"{source}: {path}: {tensor.name} must have whole heads, got {list(own)}: {FETCH}")
            dtype = "F32" if part in _DECODED and stored in gguf_formats() else stored
            begin = place if stored in _DTYPES and not turned else None
            entries[name] = GgufEntry(source, path, name, dtype, own, None, begin, stored, place, size, turned)
            place += size
    return entries


def _refuse_types(reader: Any, path: Path, source: str) -> None:
    """Raise WgradError if tensors have types that are not supported."""
    known = [*_DTYPES, *gguf_formats()]
    counts = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    if others := {name: count for name, count in sorted(counts.items()) if name not in known}:
        listed = ", ".join(f"{name} ({count})" for name, count in others.items())
        raise WgradError(
            f"{source}: {path} has tensors of types that are not read: {listed}: use a file of {', '.join(known)}"
        )


def _parts(
    name: str, shape: tuple[int, ...], size: int, names: dict[str, str], heads: dict[str, int]
) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Yield name, shape and bytes of the tensors that one of a file holds, in order.

    It is one, except for stacks of q, k and v in an architecture that has them apart, and of AltUp's projections.
    """
    stem = name.removesuffix(".weight")
    if f"{stem}.0" in names and len(shape) == 3:
        yield from ((f"{stem}.{i}.weight", shape[1:], size // shape[0]) for i in range(shape[0]))
        return
    stacked = f".{QKV}." in name and QKV not in names and heads and shape
    of_each = heads["attn_q"] + 2 * heads["attn_k"] if stacked else 0
    if not stacked or shape[0] % of_each:
        yield name, shape, size
        return
    for part, count in (("attn_q", heads["attn_q"]), ("attn_k", heads["attn_k"]), ("attn_v", heads["attn_k"])):
        yield name.replace(QKV, part), (shape[0] // of_each * count, *shape[1:]), size // of_each * count


def header_digest(path: Path, source: str) -> tuple[list[Path], str]:
    """Return the files of a model, and a digest of everything but the weights: the headers, and the factors of the
    rotary embedding. path: any part. Raises as `read_gguf_entries`."""
    found, parts = hashlib.blake2b(digest_size=16), _open_parts(path, source)
    for _, reader, _ in parts:
        found.update(reader.data[: int(reader.data_offset)])
        for tensor in reader.tensors:
            if tensor.name.startswith("rope_"):
                found.update(reader.data[int(tensor.data_offset) :][: int(tensor.n_bytes)])
    return [part.path for part in parts], found.hexdigest()


@contextmanager
def _damage(path: Path, source: str) -> Iterator[None]:
    """Turn errors of the `gguf` package into WgradError."""
    try:
        with np.errstate(over="raise"):  # sums of numbers in the file may overflow
            yield
    except (ValueError, IndexError, KeyError, TypeError, ArithmeticError, OSError) as error:
        if found := _UNKNOWN_TYPE.search(str(error)):
            raise WgradError(
                f"{source}: {path} has a tensor of type {found[1]}, which the gguf package does not know: use a file "
                "in another format, such as Q4_K or Q8_0, or fetch this one again if it should be in one of those"
            ) from error
        raise WgradError(f"{source}: {path} is cut off or damaged ({one_line(str(error))}): {FETCH}") from error


def open_reader(path: Path, source: str) -> Any:
    """Open a file with the `gguf` package's GGUFReader. Raises as `read_gguf_entries`."""
    reader_class = _reader_class(require_gguf(source, path))
    with open_input(path, source) as file, reading(path, source):
        begin = file.read(64)
    refuse_lfs_pointer(begin, path, source)
    _check_version(begin, path, source)
    with _damage(path, source):
        return reader_class(path)


def _check_version(begin: bytes, path: Path, source: str) -> None:
    """Raise WgradError if a GGUF file has another byte order or version than those that are read."""
    version, big = (int.from_bytes(begin[4:8], order) for order in ("little", "big"))
    if begin[:4] != b"GGUF" or len(begin) < 8 or version in _VERSIONS:
        return
    if big in _VERSIONS:
        raise WgradError(f"{source}: {path} has its numbers in the other byte order: convert it, or {FETCH}")
    raise WgradError(
        f"{source}: {path} has version {version} of the GGUF format, of which {_VERSIONS[0]} and {_VERSIONS[1]} are "
        "read: convert the model again with llama.cpp, or take another file"
    )


def _reader_class(gguf: Any) -> type[Any]:
    """Return a GGUFReader that checks lengths against the file, and does not make an object of each value of an array
    (a vocabulary), which would take half a minute for a large model, or any memory that the file claims."""
    GGUFValueType = gguf.GGUFValueType

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if int(offset) + int(count) * np.dtype(dtype).itemsize > self.data.size:
                raise ValueError(f"{count} numbers at byte {offset} go beyond its end")
            return super()._get(offset, dtype, count, override_order)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, length = (
                GGUFValueType(self._get(orig_offs, np.uint32)[0]),
                int(self._get(orig_offs + 4, np.uint64)[0]),
            )
            begin = orig_offs + 12
            if kind == GGUFValueType.STRING:
                size = self._string_bytes(begin, length)
            elif kind in self.gguf_scalar_to_np:
                size = length * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
            else:
                raise ValueError(f"an array of {kind.name} at byte {orig_offs}")
            return 12 + size, [self._get(begin, np.uint8, size)], [], [GGUFValueType.ARRAY, kind]

        def _string_bytes(self, begin: int, count: int) -> int:
            data, end, size = memoryview(self.data), begin, struct.Struct("<Q").unpack_from
            try:
                for _ in range(count):
                    end += 8 + size(data, end)[0]
            except (struct.error, OverflowError):
                raise ValueError(f"{count} strings at byte {begin} go beyond its end") from None
            return end - begin

    return Reader


def _heads(architecture: str, fields: dict[str, Any], path: Path, source: str) -> dict[str, int]:
    """Return the numbers of heads of q and k, by tensor name."""
    heads = fields.get(f"{architecture}.attention.head_count")
    found: dict[str, Any] = {"attn_q": heads, "attn_k": fields.get(f"{architecture}.attention.head_count_kv", heads)}
    for part, value in found.items():
        if isinstance(value, list) and len(counts := {0, *value}) < 3:  # per layer; 0: no attention
            found[part] = value = max(counts) or heads
        if not isinstance(value, int) or value < 1:
            raise WgradError(f"{source}: {path}: a head_count must be a number above 0, got {show(value)}: {FETCH}")
    return found
