"""Weights of 8-bit floats in safetensors: `<name>` in F8_E4M3, and the scales of its blocks, or of all of it, in
`<name>_scale_inv`.

Source: DeepSeek-V3's files, and transformers (integrations/finegrained_fp8.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import ml_dtypes
import numpy as np

from wgrad.device.errors import WgradError
from wgrad.train.files.decode import FETCH
from wgrad.train.files.input_files import one_line
from wgrad.train.files.safetensors_files import TensorEntry

_E4M3, _SCALES = "F8_E4M3", ("F32", "F16", "BF16", "F8_E8M0")
SCALE = "_scale_inv"
_OF_INPUTS = ("activation_scale", "input_scale")  # scales of a module's inputs, which are 16-bit here
_ROWS = 128  # decoded together, so that the float32 values of a part take little memory

Block = tuple[int, int] | None
_ONE_EACH = "without weight_block_size in config.json a weight has one scale, or each of its experts"


@dataclass(frozen=True)
class Fp8Entry(TensorEntry):
    """A weight [..., out, in], decoded to bfloat16 as in transformers.

    block: numbers of rows and columns that share a scale; None: the whole weight has one, or each expert.
    """

    codes: TensorEntry = field(repr=False)
    scales: TensorEntry = field(repr=False)
    block: Block

    def array(self) -> np.ndarray:
        return self._decoded(self.codes.octets(), self._scales()).reshape(self.shape)

    def _decoded(self, octets: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Decode the codes of some matrices to bfloat16 [matrices, out, in]."""
        height, width = self.shape[-2:]
        codes = octets.reshape(-1, height, width)
        high, wide = self.block or (height // scales.shape[1], width)
        found = np.empty(codes.shape, ml_dtypes.bfloat16)
        for matrix, of_matrix in enumerate(codes):
            columns = np.repeat(scales[matrix % len(scales)], wide, axis=1)[:, :width]
            for begin in range(0, height, _ROWS):
                part = of_matrix[begin : begin + _ROWS]
                of_rows = columns[np.arange(begin, begin + len(part)) // high]
                found[matrix, begin : begin + _ROWS] = fp8_values()[part] * of_rows
        return found

    def _scales(self) -> np.ndarray:
        """Return the scales, float32 [matrices, blocks of rows, blocks of columns]; of one matrix if all share them."""
        if self.scales.dtype == "F8_E8M0":
            values = self.scales.octets().view(ml_dtypes.float8_e8m0fnu)
        else:
            values = self.scales.array()
        shape = (-1, *self.scales.shape[-2:]) if len(self.scales.shape) > 1 else (-1, 1, 1)
        wide: np.ndarray = np.asarray(values, np.float32).reshape(shape)
        return wide

    def blocks(self, rows: int) -> Iterator[np.ndarray]:
        if len(self.shape) != 3:
            array = self.array()
            for begin in range(0, self.shape[0], rows):
                yield array[begin : begin + rows]
            return
        scales = self._scales()
        for begin, octets in zip(range(0, self.shape[0], rows), self.codes.octet_blocks(rows), strict=True):
            yield self._decoded(octets, scales if len(scales) == 1 else scales[begin : begin + rows])

    def sample(self, count: int, size: int) -> list[bytes]:
        return self.codes.sample(count, size) + self.scales.sample(count, size)


@cache
def fp8_values() -> np.ndarray:
    """Return the value of each code, float32 [256]."""
    values: np.ndarray = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return values


def _whole(entry: TensorEntry, scales: TensorEntry) -> bool:
    """Return whether a weight without blocks has one scale, or one for each expert, or for both halves of each."""
    experts = entry.shape[:-2]
    of_halves = {(*experts, 2, 1)} if entry.shape[-2] % 2 == 0 else set()
    return bool(np.prod(scales.shape) == 1) or (
        bool(experts) and scales.shape in {experts, (*experts, 1, 1)} | of_halves
    )


def with_fp8(entries: dict[str, TensorEntry], block: Block) -> dict[str, TensorEntry]:
    """Replace each 8-bit tensor and its scales by one tensor.

    Raises:
        WgradError: scales are missing or do not fit.
    """
    found = {name: entry for name, entry in entries.items() if not name.endswith((SCALE, *_OF_INPUTS))}
    coded = {name: entry for name, entry in found.items() if entry.dtype == _E4M3}
    if not coded:
        return entries
    for name, entry in coded.items():
        scales = entries.get(name + SCALE)
        if scales is None or len(entry.shape) < 2:
            raise WgradError(
                f"{entry.source}: {entry.path} has {one_line(name)} in FP8, and no {SCALE[1:]} of it: {FETCH}"
            )
        wanted: tuple[int, ...] = ()
        if block is not None:
            wanted = (*entry.shape[:-2], *(-(-n // b) for n, b in zip(entry.shape[-2:], block)))
        if scales.dtype not in _SCALES or not (scales.shape == wanted if block else _whole(entry, scales)):
            asked = f"weight_block_size of config.json asks for {list(wanted)}" if block else _ONE_EACH
            raise WgradError(
                f"{entry.source}: {one_line(scales.name)} in {scales.path} is {scales.dtype} {list(scales.shape)}: "
                f"{asked}: {FETCH}"
            )
        found[name] = Fp8Entry(entry.source, entry.path, name, "BF16", entry.shape, None, None, entry, scales, block)
    return found
