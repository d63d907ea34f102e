"""NF4: 4-bit codes of 16 levels, with one scale for a block of elements; each value is bitsandbytes'.

Source: Dettmers et al., QLoRA (2023), section 3 and appendix E; levels and rounding as in bitsandbytes 0.50. The 8-bit
map of double quantization is the dynamic data type of Dettmers et al., 8-bit Optimizers (2022), section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple

import numpy as np

from wgrad.device.formats.frozen_weight import Array, FrozenWeight

# fmt: off
LEVELS = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], np.float32)
# fmt: on
_LEVEL_CONSTANTS = {f"LEVEL_{i}": float(level) for i, level in enumerate(LEVELS)}
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
NESTED_BLOCK_SIZE = 256
VALUE_DTYPES = ("float32", "float16", "bfloat16")  # kernels take the index into this tuple

# The arrays of a stack's parts must be views (which start at multiples of 64 elements, and bindings at multiples of 256
# bytes), each part must have whole nested blocks, and no tile of a product may have rows of two parts.
PART_ROWS = 64  # rows of a part are a multiple of this
MOST_PARTS = 3
_PART_BLOCKS, _PART_NESTED = 256, 64  # parts start at multiples of these in absmax; nested_absmax and nested_offset

_BYTE_LEVELS = np.stack([LEVELS[np.arange(256) >> 4], LEVELS[np.arange(256) & 15]], axis=1)  # high nibble first


def thresholds(levels: np.ndarray) -> np.ndarray:
    """Return the midpoints between ascending levels; a value that equals one takes the lower code."""
    values: np.ndarray = (levels[:-1] + levels[1:]) / levels.dtype.type(2)
    return values


@cache
def dynamic_map() -> np.ndarray:
    """Return the signed 8-bit dynamic data type: float32 [256], ascending, with 0 at index 127 and 1 at 255.

    After the sign, e leading zeros give the decade 10^-e, and the remaining 6 - e bits a linear fraction: the midpoints
    of 2^(6 - e) equal parts of [0.1, 1]. Zero and one are added to these.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = _linspace_float32(0.1, 1.0, 2**decade + 1)
        middles = (edges[:-1] + edges[1:]) / np.float32(2)
        scaled = middles * np.float32(10 ** (decade - 6))
        values += [*scaled.tolist(), *(-scaled).tolist()]
    result = np.sort(np.array(values, np.float32))
    result.flags.writeable = False
    return result


def _linspace_float32(start: float, stop: float, count: int) -> np.ndarray:
    """Return equal steps counted from both ends in float32, as torch.linspace does: the map must match to the bit."""
    first, last = np.float32(start), np.float32(stop)
    step = (last - first) / np.float32(count - 1)
    index = np.arange(count)
    up_half = (first.astype(np.float64) + step.astype(np.float64) * index).astype(np.float32)
    down_half = (last.astype(np.float64) - step.astype(np.float64) * (count - 1 - index)).astype(np.float32)
    return np.where(index < count // 2, up_half, down_half).astype(np.float32)


def _quantize_blocks(flat: np.ndarray, size: int, limits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return codes uint8 [n] and absmax [ceil(n / size)]. The last block is padded with zeros."""
    blocks = np.pad(flat, (0, -flat.size % size)).reshape(-1, size)
    absmax = np.abs(blocks).max(axis=1)
    scaled = blocks * (flat.dtype.type(1) / np.maximum(absmax, flat.dtype.type(1e-38)))[:, None]
    codes = np.searchsorted(limits.astype(flat.dtype), scaled.reshape(-1)[: flat.size], side="left")
    return codes.astype(np.uint8), absmax


class Place(NamedTuple):
    """Start of a part of a stack: its first row, element and block, and its first indices in absmax, nested_absmax and
    nested_offset."""

    row: int
    element: int
    block: int
    absmax: int
    nested: int
    offset: int


def _view(array: np.ndarray, shape: Sequence[int], offset: int) -> np.ndarray:
    return array.reshape(-1)[offset : offset + int(np.prod(shape))].reshape(tuple(shape))


@dataclass(frozen=True)
class NF4Array(FrozenWeight):
    """A frozen [out, in] weight in bitsandbytes' NF4 layout, on a device.

    packed: uint8 [ceil(n / 2)], element 2j in the high nibble of byte j, n = out * in row-major.
    Without double quantization: absmax float32 [ceil(n / block_size)].
    With it: absmax uint8 of that shape, nested_absmax float32 [ceil(blocks / nested_block_size)],
    nested_code float32 [256], nested_offset float32 [1]:
    absmax[i] = nested_code[absmax[i]] * nested_absmax[i // nested_block_size] + nested_offset.
    value_dtype: float32, float16 or bfloat16: dtype to which level * absmax, a float32 product, is rounded. It is the
    dtype of the weight that bitsandbytes quantized (`dtype` of its quant_state).
    parts: Rows of each weight in a stack (`stack`). packed has no gaps; the other arrays have gaps, so that each part
    is a weight on views of them (`split`).
    """

    format: ClassVar[str] = "nf4"
    unit: ClassVar[int] = 8  # codes of a 32-bit word

    packed: Array
    absmax: Array
    shape: tuple[int, int]
    block_size: int = 64
    nested_absmax: Array | None = None
    nested_code: Array | None = None
    nested_offset: Array | None = None
    nested_block_size: int = NESTED_BLOCK_SIZE
    value_dtype: str = "float32"
    parts: tuple[int, ...] = ()

    @property
    def nested(self) -> bool:
        return self.nested_absmax is not None

    @property
    def variant(self) -> str:
        return "nf4_nested" if self.nested else "nf4"

    def arrays(self) -> dict[str, Array | None]:
        names = ("packed", "absmax", "nested_absmax", "nested_code", "nested_offset")
        return {name: getattr(self, name) for name in names}

    def rules(self) -> Iterator[tuple[bool, str]]:
        yield self.block_size in BLOCK_SIZES, f"block_size must be one of {BLOCK_SIZES}, got {self.block_size}"
        yield self.value_dtype in VALUE_DTYPES, f"value_dtype must be one of {VALUE_DTYPES}, got {self.value_dtype!r}"
        wanted, size = -(-int(self.shape[0]) * int(self.shape[1]) // 2), int(self.packed.size)
        yield size == wanted, f"packed must hold {wanted} bytes for shape {list(self.shape)}, got {size}"
        if self.parts:
            right = sum(self.parts) == self.shape[0] and self.stackable(self.parts, self.shape[1], self.block_size)
            yield right, f"parts must be what `stack` makes for shape {list(self.shape)}, got {list(self.parts)}"

    def layout(self) -> Iterator[tuple[str, int, str]]:
        blocks = -(-int(self.shape[0]) * int(self.shape[1]) // self.block_size)
        nested, offsets = -(-blocks // self.nested_block_size), 1
        if self.parts:
            *_, end = self.places()
            blocks, nested, offsets = end.absmax, end.nested, end.offset
        yield "absmax", blocks, "u8" if self.nested else "f32"
        if self.nested:
            yield "nested_absmax", nested, "f32"
            yield "nested_code", 256, "f32"
            yield "nested_offset", offsets, "f32"

    def constants(self) -> dict[str, bool | int | float]:
        """Return the shaders' constants. ROUND: index of value_dtype in VALUE_DTYPES. LEVEL_i: value of code i."""
        return {
            "NESTED": self.nested,
            "STACKED": bool(self.parts),
            "ROUND": VALUE_DTYPES.index(self.value_dtype),
            **_LEVEL_CONSTANTS,
        }

    def parameters(self) -> tuple[int, ...]:
        """Return log2 of the elements of a block, and of the blocks of a nested block."""
        return self.block_size.bit_length() - 1, self.nested_block_size.bit_length() - 1

    # ---- stacks ----------------------------------------------------------------------------
    @staticmethod
    def stackable(parts: Sequence[int], columns: int, block_size: int) -> bool:
        """Return whether weights of these row counts can be stacked: each has whole blocks, words and tiles."""
        whole = all(rows % PART_ROWS == 0 and rows * columns % block_size == 0 for rows in parts)
        return 1 < len(parts) <= MOST_PARTS and columns % 8 == 0 and whole

    def places(self) -> list[Place]:
        """Return the start of each part of a stack, and the end of the last."""
        found: list[Place] = []
        row = absmax = nested = 0
        for part in (*self.parts, 0):
            element = row * self.shape[1]
            block = element // self.block_size
            found.append(Place(row, element, block, absmax, nested, _PART_NESTED * len(found)))
            blocks = part * self.shape[1] // self.block_size
            row += part
            absmax += -(-blocks // _PART_BLOCKS) * _PART_BLOCKS
            nested_blocks = -(-blocks // self.nested_block_size)
            nested += -(-nested_blocks // _PART_NESTED) * _PART_NESTED
        return found

    def split(self, view: Callable[[Array, Sequence[int], int], Array]) -> list[NF4Array]:
        """Return the parts of a stack as weights on views (`Device.view`) of its arrays."""
        weights = []
        for rows, at in zip(self.parts, self.places()):
            elements = rows * self.shape[1]
            blocks = elements // self.block_size
            changed: dict[str, Any] = {"packed": view(self.packed, (elements // 2,), at.element // 2)}
            changed |= {"absmax": view(self.absmax, (blocks,), at.absmax)}
            if self.nested:
                nested = -(-blocks // self.nested_block_size)
                changed |= {"nested_absmax": view(self.nested_absmax, (nested,), at.nested)}
                changed |= {"nested_offset": view(self.nested_offset, (1,), at.offset)}
            weights.append(replace(self, shape=(rows, self.shape[1]), parts=(), **changed))
        return weights

    @classmethod
    def stack(cls, weights: Sequence[NF4Array], device: Any, one_code: bool = False) -> NF4Array | None:
        """Stack weights in new arrays on their device.

        Args:
            weights: Weights of one block size, value dtype and nested_code, with equal columns.
            device: Their device.
            one_code: Whether their nested_code arrays are known to be equal, though they are not one array.

        Returns:
            The stack; None if they cannot be stacked.
        """
        first, columns = weights[0], weights[0].shape[1]
        parts = tuple(weight.shape[0] for weight in weights)
        alike = all(
            w.shape[1] == columns
            and (w.block_size, w.value_dtype) == (first.block_size, first.value_dtype)
            and (one_code or w.nested_code is first.nested_code)
            and w.nested_block_size == NESTED_BLOCK_SIZE
            for w in weights
        )
        if not alike or not cls.stackable(parts, columns, first.block_size):
            return None
        whole = replace(first, shape=(sum(parts), columns), parts=parts)
        *_, end = whole.places()
        sizes = {"packed": end.element // 2, "absmax": end.absmax}
        if first.nested:
            sizes |= {"nested_absmax": end.nested, "nested_offset": end.offset}
        arrays = {name: device.zeros((size,), getattr(first, name).dtype) for name, size in sizes.items()}
        whole = replace(whole, **arrays)
        for source, target in zip(weights, whole.split(device.view)):
            for name in sizes:
                device.copy(getattr(source, name), getattr(target, name))
        return whole

    def rows(self, first: int, last: int, compute: np.dtype) -> np.ndarray:
        if self.parts:
            parts = zip(self.split(_view), self.places())
            return np.concatenate(
                [
                    part.rows(max(first - at.row, 0), min(last - at.row, part.shape[0]), compute)
                    for part, at in parts
                    if first < at.row + part.shape[0] and last > at.row
                ]
            )
        columns = self.shape[1]
        start, stop = first * columns, last * columns
        codes = self.packed.reshape(-1)[start // 2 : -(-stop // 2)]
        pair = np.result_type(compute, np.complex64)  # two levels as one item: NumPy looks them up ten times as fast
        levels = _BYTE_LEVELS.astype(compute, copy=False).view(pair)[:, 0]
        values = levels[codes].view(compute)[start % 2 :][: stop - start]
        blocks = np.arange(start // self.block_size, -(-stop // self.block_size))
        scales = self._scales(blocks, compute)
        if start % self.block_size == 0 == stop % self.block_size:
            by_block = values.reshape(-1, self.block_size)
            by_block *= scales[:, None]
        else:
            values *= np.repeat(scales, self.block_size)[start % self.block_size :][: stop - start]
        if self.value_dtype != "float32":
            values = values.astype(np.float32).astype(self.value_dtype).astype(compute)
        result: np.ndarray = values.reshape(-1, columns)
        return result

    def _scales(self, blocks: np.ndarray, compute: np.dtype) -> np.ndarray:
        """Return the absolute maximum of each of these blocks, with double quantization undone."""
        absmax = self.absmax[blocks]
        if self.nested_absmax is None or self.nested_code is None or self.nested_offset is None:
            values: np.ndarray = absmax.astype(compute, copy=False)
            return values
        outer = self.nested_absmax.astype(compute, copy=False)[blocks // self.nested_block_size]
        values = self.nested_code.astype(compute, copy=False)[absmax] * outer + self.nested_offset.astype(compute)[0]
        return values

    @classmethod
    def quantize_rules(cls, block_size: int, double: bool) -> Iterator[tuple[bool, str]]:
        yield block_size in BLOCK_SIZES, f"block_size must be one of {BLOCK_SIZES}, got {block_size}; 64 is usual"

    @classmethod
    def quantize(cls, w: np.ndarray, block_size: int = 64, double: bool = False) -> NF4Array:
        shape = (int(w.shape[0]), int(w.shape[1]))
        codes, absmax = _quantize_blocks(w.reshape(-1), block_size, thresholds(LEVELS))
        if codes.size % 2:
            codes = np.append(codes, np.uint8(7))  # code of 0
        made = cls((codes[0::2] << 4) | codes[1::2], absmax, shape, block_size)
        return made.with_nested_scales() if double else made

    def with_nested_scales(self) -> NF4Array:
        """Return this weight, whose arrays are NumPy's, with its absmax quantized."""
        kind = self.absmax.dtype
        code, offset = dynamic_map().astype(kind), self.absmax.mean(dtype=np.float64).astype(kind).reshape(1)
        inner, outer = _quantize_blocks(self.absmax - offset, NESTED_BLOCK_SIZE, thresholds(code))
        return replace(self, absmax=inner, nested_absmax=outer, nested_code=code, nested_offset=offset)
