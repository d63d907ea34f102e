"""Frozen weights in blocks of few bits: the interface of a format to linear layers and devices.

A format is a frozen dataclass derived from FrozenWeight, in a file <format>.py of this folder. It defines:

- the parts of a weight: format, unit, arrays, rules, layout, constants, parameters;
- in NumPy, its values (rows), which every device must reproduce, and quantization (quantize), which makes the weights
  of the self-test;
- quantize_rules, if every device quantizes to it;
- gguf_type and from_gguf, if GGUF files have it.

Each device has one file with the decoder: wgsl/formats/<format>.inc.wgsl, hip/formats/<format>.hpp. Launchers bind the
arrays in their order and pass the parameters. Constants are known when a kernel is compiled.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from inspect import isabstract
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

Array = Any  # the device's own type
AGAIN = "quantize the weight again or check the file that it came from"


class FrozenWeight(ABC):
    """A frozen [out, in] weight on a device: arrays and plain numbers."""

    format: ClassVar[str]
    gguf_type: ClassVar[str] = ""  # name of the format in GGUF files; "": they have no such format
    unit: ClassVar[int]  # elements decoded at once; rows that it does not divide are decoded before the GEMM
    block: ClassVar[int] = 1  # the length of rows is a multiple of this
    shape: tuple[int, int]
    value_dtype: str  # dtype that decoded values are rounded to; "float32": they are not rounded
    parts: tuple[int, ...] = ()  # rows of each weight in a stack; (): this is no stack

    @property
    def variant(self) -> str:
        """Return the name of the kernels that decode this weight. It is the format if that has one kind of kernels."""
        return self.format

    @abstractmethod
    def arrays(self) -> dict[str, Array | None]:
        """Return the arrays by field, in the order in which kernels take them. None: this weight has no such part."""

    @abstractmethod
    def rules(self) -> Iterator[tuple[bool, str]]:
        """Yield (whether it holds, "<field> must ..., got ...") for every rule except those of `layout`."""

    @abstractmethod
    def layout(self) -> Iterator[tuple[str, int, str]]:
        """Yield (field, size, dtype as rules write it) for the arrays whose size and dtype are checked."""

    @abstractmethod
    def constants(self) -> dict[str, bool | int | float]:
        """Return the compile-time constants of kernels that decode this weight."""

    @abstractmethod
    def parameters(self) -> tuple[int, ...]:
        """Return the integers that kernels take in addition to the arrays."""

    @abstractmethod
    def rows(self, first: int, last: int, compute: np.dtype) -> np.ndarray:
        """Decode rows first to last - 1 from NumPy arrays: [last - first, in] in the dtype `compute`."""

    @classmethod
    def quantize_rules(cls, block_size: int, double: bool) -> Iterator[tuple[bool, str]]:
        """Yield rules for the arguments of `quantize`, as `rules` does."""
        yield False, f"format must be one that devices bring weights into, got {cls.format}; nf4 is usual"

    @classmethod
    @abstractmethod
    def quantize(cls, w: np.ndarray, block_size: int = 64, double: bool = False) -> Self:
        """Quantize w, float32 or float64 [out, in], in NumPy. block_size, double: for formats that have a choice."""

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Self:
        """Return the weight of rows of a GGUF file, uint8 [out, bytes of a row], in NumPy. It needs a `gguf_type`."""
        raise NotImplementedError

    def finite_parts(self) -> Iterator[np.ndarray]:
        """Yield the floats of NumPy arrays that must be finite for all values of the weight to be finite."""
        for array in self.arrays().values():
            if array is not None and array.dtype.kind == "f":
                yield array

    def map_arrays(self, change: Callable[[Array], Array]) -> Self:
        """Return this weight with `change` applied to each of its arrays."""
        parts = {name: change(array) for name, array in self.arrays().items() if array is not None}
        return dataclasses.replace(self, **parts)  # type: ignore[type-var]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays().values() if array is not None)


@cache
def formats() -> dict[str, type[FrozenWeight]]:
    """Return the formats in this folder by name, in alphabetical order."""
    for path in Path(__file__).parent.glob("*.py"):
        import_module(f"wgrad.device.formats.{path.stem}")
    kinds = {kind.format: kind for kind in _derived(FrozenWeight) if not isabstract(kind)}
    return dict(sorted(kinds.items()))


def _derived(kind: type[Any]) -> Iterator[type[Any]]:
    for derived in kind.__subclasses__():
        yield derived
        yield from _derived(derived)


def gguf_formats() -> dict[str, type[FrozenWeight]]:
    """Return the formats of GGUF files, by their GGUF names."""
    return {kind.gguf_type: kind for kind in formats().values() if kind.gguf_type}
