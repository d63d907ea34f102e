"""Frozen weights in blocks of few bits: what linear layers and the device rooms know of a format.

A format is a frozen dataclass derived from FrozenWeight, in a file of this folder, <format>.py. It gives what a weight
consists of (format, unit, arrays, rules, layout, constants, parameters) and, in NumPy, its values (rows), which every
device must give, and how a weight of full precision becomes one (quantize), from which the self-test's cases are made;
quantize_rules where every device does that too; gguf_type and from_gguf where GGUF files have it.
Its decoder is one file on each device: wgsl/formats/<format>.inc.wgsl, hip/formats/<format>.hpp. Launchers bind the
arrays in their order and hand over the parameters; the constants are known when a kernel is compiled.
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

Array = Any  # whatever the device uses
AGAIN = "quantise the weight again or check the file that it came from"


class FrozenWeight(ABC):
    """A frozen [out, in] weight of some format on a device: arrays and plain numbers."""

    format: ClassVar[str]
    gguf_type: ClassVar[str] = ""  # what GGUF files call it, where they have it
    unit: ClassVar[int]  # elements that are decoded at once; a row of another length is decoded before a product
    block: ClassVar[int] = 1  # rows are of a multiple of so many elements
    shape: tuple[int, int]
    value_dtype: str  # what decoded values are rounded to; "float32": they are used as they are
    parts: tuple[int, ...] = ()  # rows of each of the weights of which this is a stack, where it is one

    @property
    def variant(self) -> str:
        """Names the kernels that decode this weight: the format, where its kernels are all of one kind."""
        return self.format

    @abstractmethod
    def arrays(self) -> dict[str, Array | None]:
        """The arrays by field, in the order in which kernels take them. None: this weight has no such part."""

    @abstractmethod
    def rules(self) -> Iterator[tuple[bool, str]]:
        """(holds, "<field> must ..., got ...") of every rule but those of `layout`."""

    @abstractmethod
    def layout(self) -> Iterator[tuple[str, int, str]]:
        """(field, size, dtype as rules write it) of the arrays that are checked for both."""

    @abstractmethod
    def constants(self) -> dict[str, bool | int | float]:
        """Compile-time constants of a kernel that decodes this weight."""

    @abstractmethod
    def parameters(self) -> tuple[int, ...]:
        """Integers that a kernel takes beside the arrays."""

    @abstractmethod
    def rows(self, first: int, last: int, compute: np.dtype) -> np.ndarray:
        """Rows first..last, of NumPy arrays: [last - first, in] in the dtype `compute`."""

    @classmethod
    def quantize_rules(cls, block_size: int, double: bool) -> Iterator[tuple[bool, str]]:
        """As `rules`, of what `quantize` is asked for."""
        yield False, f"format must be one that devices bring weights into, got {cls.format}; nf4 is usual"

    @classmethod
    @abstractmethod
    def quantize(cls, w: np.ndarray, block_size: int = 64, double: bool = False) -> Self:
        """w [out, in] float32 or float64, in NumPy. block_size, double: where the format has a choice."""

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Self:
        """rows: uint8 [out, bytes of a row] as in a GGUF file, of a format with a `gguf_type`; in NumPy."""
        raise NotImplementedError

    def finite_parts(self) -> Iterator[np.ndarray]:
        """Floats of NumPy arrays that must be finite if the weight is to be."""
        for array in self.arrays().values():
            if array is not None and array.dtype.kind == "f":
                yield array

    def map_arrays(self, change: Callable[[Array], Array]) -> Self:
        """The same weight with `change` applied to each of its arrays."""
        parts = {name: change(array) for name, array in self.arrays().items() if array is not None}
        return dataclasses.replace(self, **parts)  # type: ignore[type-var]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays().values() if array is not None)


@cache
def formats() -> dict[str, type[FrozenWeight]]:
    """Every format by its name, in the order of names: the files of this folder."""
    for path in Path(__file__).parent.glob("*.py"):
        import_module(f"wgrad.device.formats.{path.stem}")
    kinds = {kind.format: kind for kind in _derived(FrozenWeight) if not isabstract(kind)}
    return dict(sorted(kinds.items()))


def _derived(kind: type[Any]) -> Iterator[type[Any]]:
    for derived in kind.__subclasses__():
        yield derived
        yield from _derived(derived)


def gguf_formats() -> dict[str, type[FrozenWeight]]:
    """Those that GGUF files have, by their names there."""
    return {kind.gguf_type: kind for kind in formats().values() if kind.gguf_type}
