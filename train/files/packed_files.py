"""Quantized weights in safetensors that are decoded to 16 bits when read: compressed-tensors, ModelOpt, GPTQ, AWQ,
bitsandbytes' 8 bits and FBGEMM's FP8.

Sources: github.com/vllm-project/compressed-tensors (compressors), github.com/NVIDIA/Model-Optimizer
(torch/quantization/qtensor), AutoGPTQ (nn_modules/qlinear), AutoAWQ (utils/packing_utils.py), bitsandbytes
(int8_vectorwise_dequant), transformers (integrations/fbgemm_fp8.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from wgrad.device.errors import WgradError
from wgrad.train.files.decode import FETCH
from wgrad.train.files.fp8_files import fp8_values
from wgrad.train.files.input_files import one_line
from wgrad.train.files.safetensors_files import TensorEntry

COMPRESSED, GPTQ, AWQ, INT8 = "compressed-tensors", "gptq", "awq", "bitsandbytes"
MODELOPT, FBGEMM = "modelopt", "fbgemm_fp8"
_AWQ_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # the column, of eight, of each code in a word
_CODES = {
    COMPRESSED: (".weight_packed", ".weight"),
    **dict.fromkeys((GPTQ, AWQ), (".qweight",)),
    **dict.fromkeys((INT8, MODELOPT, FBGEMM), (".weight",)),
}
# A module's scales, zero points, group of each column, and divisor (of ModelOpt: factor) of all scales; further tensors
# are not read.
_OTHERS = {
    COMPRESSED: (".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_global_scale"),
    GPTQ: (".scales", ".qzeros", ".g_idx", ""),
    AWQ: (".scales", ".qzeros", "", ""),
    INT8: (".SCB", "", "", ""),
    MODELOPT: (".weight_scale", "", "", ".weight_scale_2"),
    FBGEMM: (".weight_scale", "", "", ""),
}
_WITH_ZEROS, _WITH_PAIRS = (GPTQ, AWQ), (COMPRESSED, MODELOPT)
_SHAPE = ".weight_shape"
_UNREAD = (
    *(_SHAPE, ".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".k_scale", ".v_scale"),
    *(".weight_format", ".input_scale_ub"),
)
_FLOATS = {"F32": ml_dtypes.bfloat16, "BF16": ml_dtypes.bfloat16, "F16": np.float16}
_NAMES = {np.float16: "F16", ml_dtypes.bfloat16: "BF16"}
_POWERS = ("U8", "F8_E8M0")  # scales of compressed-tensors that are powers of two
_BYTES = ("F8_E4M3", "I8")
_PAIRS = "U8"  # two floats of 4 bits (E2M1), the lower half first
_E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
_ONE_OF_127 = np.float32(7.874015718698502e-3)
PACKED_BITS = (2, 4, 8)
_AT_ONCE = 1 << 20  # numbers that are decoded at a time


@dataclass(frozen=True)
class Packing:
    """The format of a model's weights.

    bits: of a code in a 32-bit word; 0: each module has its own.
    less_one: GPTQ's zero points are stored minus 1.
    block: numbers of rows and columns that share a scale of 8-bit codes (None: by the shape of the scales).
    """

    method: str
    bits: int = 4
    less_one: bool = False
    block: tuple[int, int] | None = None


@dataclass(frozen=True)
class PackedEntry(TensorEntry):
    """A weight [out, in]: its codes and scales, and its zero points and groups of columns if it has them. whole: the
    divisor of all scales."""

    packing: Packing = field(repr=False)
    codes: TensorEntry = field(repr=False)
    scales: TensorEntry = field(repr=False)
    zeros: TensorEntry | None = field(repr=False)
    groups: TensorEntry | None = field(repr=False)
    whole: TensorEntry | None = field(repr=False)

    def array(self) -> np.ndarray:
        columns = self.shape[1]
        codes, scales = self._codes(), self._scales()
        if self.packing.method in _WITH_ZEROS:
            scales = scales.T
        scales = scales.reshape(1, 1) if scales.size == 1 else scales.reshape(scales.shape[0], -1)
        zeros = None if self.zeros is None else self._zeros(self.zeros, scales.shape)
        place = self._columns(columns, scales.shape[1])
        rows = np.arange(self.shape[0]) // _share(self.shape[0], scales.shape[0], self.packing.block, 0)
        found = np.empty(self.shape, _dtype_of(self.packing, self.scales))
        step = max(1, _AT_ONCE // columns)
        for begin in range(0, self.shape[0], step):
            own = rows[begin : begin + step]
            values = codes[begin : begin + step].astype(np.float32)
            if zeros is not None:
                values -= zeros[own][:, place]
            with np.errstate(all="ignore"):  # scales that are not finite or too large: their weights are not finite
                values *= scales[own][:, place]
                found[begin : begin + step] = values * _ONE_OF_127 if self.packing.method == INT8 else values
        return found

    def blocks(self, rows: int) -> Iterator[np.ndarray]:
        array = self.array()
        for begin in range(0, self.shape[0], rows):
            yield array[begin : begin + rows]

    def sample(self, count: int, size: int) -> list[bytes]:
        every = (self.codes, self.scales, self.zeros, self.groups, self.whole)
        parts = [part for part in every if part is not None]
        return [block for part in parts for block in part.sample(count, size)]

    def _scales(self) -> np.ndarray:
        """float32, in the shape of the file."""
        scales: np.ndarray
        if self.scales.dtype == "F8_E4M3":
            scales = fp8_values()[self.scales.octets()]
        elif self.scales.dtype in _POWERS:
            octets = self.scales.array() if self.scales.dtype == "U8" else self.scales.octets()
            scales = octets.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        else:
            scales = np.asarray(self.scales.array(), np.float32)
        if self.whole is None:
            return scales
        whole = np.asarray(self.whole.array(), np.float32).reshape(())
        with np.errstate(all="ignore"):
            return scales * whole if self.packing.method == MODELOPT else scales / whole

    def _codes(self) -> np.ndarray:
        """Return the codes [out, in], those of compressed-tensors with their sign."""
        values: np.ndarray
        if self.codes.dtype == "F8_E4M3":
            values = fp8_values()[self.codes.octets()]
            return values
        if self.codes.dtype == _PAIRS:
            pairs = self.codes.array()
            values = _E2M1[np.stack([pairs & 15, pairs >> 4], axis=-1)].reshape(self.shape)
            return values
        words: np.ndarray = self.codes.array()
        if self.codes.dtype == "I8":
            return words
        return self._unpacked(words, 0 if self.packing.method == GPTQ else 1)

    def _unpacked(self, words: np.ndarray, axis: int) -> np.ndarray:
        """Return the codes that words int32 hold along an axis; those of GPTQ and AWQ transposed."""
        bits, method = self.packing.bits, self.packing.method
        words = words.T if axis == 0 else words
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        found = (np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
        if method == AWQ:
            found = found[..., np.argsort(_AWQ_ORDER)]
        codes = found.reshape(len(words), -1)
        codes = codes.T if axis == 0 else codes
        if method == COMPRESSED:
            return codes.astype(np.int32) - (1 << (bits - 1))
        return codes.T

    def _zeros(self, zeros: TensorEntry, shape: tuple[int, ...]) -> np.ndarray:
        """Return the zero points, float32 [rows of scales, groups]."""
        found = zeros.array()
        if zeros.dtype == "I32":
            found = self._unpacked(found, 0 if self.packing.method == COMPRESSED else 1)
        if self.packing.less_one:
            found = (found + 1) & ((1 << self.packing.bits) - 1)
        if found.size % shape[1] or found.size < math.prod(shape):
            raise WgradError(
                f"{zeros.source}: {one_line(zeros.name)} in {zeros.path} must have a zero point for each of "
                f"{math.prod(shape)} scales; got {found.size}: {FETCH}"
            )
        return found.astype(np.float32).reshape(-1, shape[1])[: shape[0]]

    def _columns(self, columns: int, groups: int) -> np.ndarray:
        """Return the column of scales that belongs to each column of the weight."""
        if self.groups is not None and groups > 1:
            listed: np.ndarray = self.groups.array()
            if listed.shape != (columns,) or listed.max() >= groups:
                raise WgradError(
                    f"{self.groups.source}: {one_line(self.groups.name)} in {self.groups.path} must have the group of "
                    f"each of {columns} columns, below {groups}; got {list(listed.shape)} up to {listed.max()}: {FETCH}"
                )
            if listed.min() >= 0:  # -1: no group
                return listed
        return np.arange(columns) // _share(columns, groups, self.packing.block, 1)


def _share(length: int, scales: int, block: tuple[int, int] | None, axis: int) -> int:
    """Return how many rows or columns share a scale. Some modules of a model with blocks may have none."""
    if block is not None and scales == -(-length // block[axis]):
        return block[axis]
    return -(-length // scales)


def with_packed(entries: dict[str, TensorEntry], packing: Packing | None) -> dict[str, TensorEntry]:
    """Replace codes, scales and other parts by weights. Raises WgradError if a part is missing or does not fit."""
    if packing is None:
        return entries
    others = tuple(filter(None, _OTHERS[packing.method]))
    found = {name: entry for name, entry in entries.items() if not name.endswith((*others, *_UNREAD))}
    for name, entry in list(found.items()):
        ending = next((part for part in _CODES[packing.method] if name.endswith(part)), None)
        if ending is None or (ending == ".weight" and entry.dtype not in (*_BYTES, _PAIRS)):
            continue
        module = name.removesuffix(ending)
        del found[name]
        parts = [entries.get(module + part) if part else None for part in _OTHERS[packing.method]]
        if not packing.bits and entry.dtype == "I32":
            own = replace(packing, bits=_bits_of(entry, entries.get(module + _SHAPE)))
        else:
            own = replace(packing, bits=packing.bits or 8)
        found[f"{module}.weight"] = _packed(f"{module}.weight", entry, parts, own)
    return found


def _packed(name: str, codes: TensorEntry, parts: list[TensorEntry | None], packing: Packing) -> PackedEntry:
    scales, zeros, groups, whole = parts
    in_floats = scales is not None and scales.dtype in (
        *_FLOATS,
        *(("F8_E4M3", *_POWERS) if packing.method in _WITH_PAIRS else ()),
    )
    if scales is None or not in_floats or (zeros is None and packing.method in _WITH_ZEROS):
        lacks = _OTHERS[packing.method][1 if in_floats else 0]
        raise WgradError(
            f"{codes.source}: {codes.path} has {one_line(codes.name)}, and no {lacks[1:]} of it in floats: {FETCH}"
        )
    per, (rows, columns) = 32 // packing.bits, codes.shape if len(codes.shape) == 2 else (0, 0)
    if codes.dtype in _BYTES:
        shape = (rows, columns)
    elif codes.dtype == _PAIRS:
        shape = (rows, 2 * columns)
    elif packing.method == GPTQ:
        shape = (columns, rows * per)
    else:
        shape = (columns * per, rows) if packing.method == AWQ else (rows, columns * per)
    of_scales = _sizes(scales.shape, packing)
    fits = all(
        count in (1, size) or (block and count == -(-size // block)) or (axis and size % count == 0)
        for axis, (count, size, block) in enumerate(zip(of_scales, shape, packing.block or (0, 0)))
    )
    known = codes.dtype in (*_BYTES, "I32", *([_PAIRS] if packing.method in _WITH_PAIRS else []))
    one = whole is None or (whole.dtype in _FLOATS and np.prod(whole.shape) == 1)
    if not (rows and known and one and fits) or len(of_scales) != 2 or not min(of_scales):
        raise WgradError(
            f"{codes.source}: {one_line(codes.name)} in {codes.path} is {codes.dtype} {list(codes.shape)}, which does "
            f"not go with scales {list(scales.shape)} of {packing.bits} bits: {FETCH}"
        )
    kind = _NAMES[_dtype_of(packing, scales)]
    return PackedEntry(
        codes.source, codes.path, name, kind, shape, None, None, packing, codes, scales, zeros, groups, whole
    )  # fmt: skip


def _dtype_of(packing: Packing, scales: TensorEntry) -> Any:
    """The type in which weights are decoded; bitsandbytes computes in float16."""
    return np.float16 if packing.method == INT8 else _FLOATS.get(scales.dtype, ml_dtypes.bfloat16)


def _bits_of(codes: TensorEntry, shape: TensorEntry | None) -> int:
    """Bits of a code of a module that says how many columns it has. WgradError: it does not, or they do not fit."""
    columns = int(shape.array().reshape(-1)[-1]) if shape is not None and shape.dtype == "I64" else 0
    found = [bits for bits in PACKED_BITS if codes.shape[-1:] == (-(-columns * bits // 32),)]
    if len(found) != 1:
        raise WgradError(
            f"{codes.source}: {codes.path} has {one_line(codes.name)}, and no weight_shape of it that says how many of "
            f"{', '.join(map(str, PACKED_BITS))} bits its codes have: {FETCH}"
        )
    return found[0]


def _sizes(shape: tuple[int, ...], packing: Packing) -> tuple[int, ...]:
    """Return the rows and columns of scales, in the order of the weight's."""
    shape = tuple(reversed(shape)) if packing.method in _WITH_ZEROS else shape
    return {0: (1, 1), 1: (*shape, 1)}.get(len(shape), shape)
