"""Lazy elementwise operators: a chain of them is computed in one launch of `fused` when its values are needed.

A Lazy is an array that is not computed yet: a view of an array (transposed, sliced, broadcast), a function of other
Lazies and numbers, or a sum or maximum of one. `array()` computes it once; later users read that array. Earlier users
compute it again in their own launch, because elementwise work costs less than memory.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np

from wgrad.device.contract import Array, Device
from wgrad.device.errors import ShapeError
from wgrad.device.expression import MOST_ARRAYS, View, row_major
from wgrad.device.shown import short

Operand: TypeAlias = "Lazy | float"
MOST_INSTRUCTIONS = 96  # of one launch
_MOST_SCALARS = 12  # of one launch
EXACT = 1 << 24  # whole numbers up to this are exact in the float32 of a launch
_MOST_VIEWED = 40  # strides, offsets and sizes that fit the uniform of one launch
_COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne"}
# Functions that map whole numbers to whole numbers.
_WHOLE = {"add", "sub", "mul", "neg", "abs", "sign", "maximum", "minimum", "relu", "where"}
_VIEW_ALIGN = 64  # elements; a device's view starts at a multiple of it

P = ParamSpec("P")
R = TypeVar("R")
# Threads share Lazies, and a Lazy changes when it is computed.
_lock = threading.RLock()


def _alone(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method during which no other thread may compute a Lazy."""

    @functools.wraps(method)
    def run(*args: P.args, **options: P.kwargs) -> R:
        with _lock:
            return method(*args, **options)

    return run


class Lazy:
    """An array that is not computed yet.

    Attributes:
        op: "view", "index", "reduce", "made" once it is computed, or a function of device/expression.py.
        args: Operands.
        detail: Of a view: array, strides and offset; of an index: axis; of a reduction: kind and axes.
        made: The array, once it is computed.
        cost: Instructions, counted once for each use.
        scalars: Numbers among its instructions.
        arrays: Arrays that it reads, with their views.
    """

    __slots__ = ("op", "args", "shape", "dtype", "device", "detail", "made", "cost", "arrays", "scalars")

    def __init__(
        self,
        op: str,
        args: tuple[Operand, ...],
        shape: tuple[int, ...],
        dtype: np.dtype,
        device: Device,
        detail: Any = None,
    ) -> None:
        self.op, self.args, self.shape, self.dtype, self.device, self.detail = op, args, shape, dtype, device, detail
        self.made: Array | None = None
        self.cost, self.scalars = 1, 0
        self.arrays: frozenset[Any] = frozenset()
        for arg in args:
            if isinstance(arg, Lazy):
                self.cost += arg.cost
                self.scalars += arg.scalars
                self.arrays |= arg.arrays
            else:
                self.cost, self.scalars = self.cost + 1, self.scalars + 1
        if op == "view":
            self.arrays = frozenset([(id(detail[0]), *detail[1:])])

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_view(self) -> bool:
        return self.op == "view" and self.made is None

    @_alone
    def reads(self, owner: Any) -> bool:
        """Return whether its value is not computed yet, and depends on an array in a memory (`memory_of`)."""
        if self.made is not None:
            return False
        if self.op == "view":
            return memory_of(self.detail[0]) is owner
        return any(isinstance(arg, Lazy) and arg.reads(owner) for arg in self.args)

    # ---- values --------------------------------------------------------------------------
    @_alone
    def array(self) -> Array:
        """Return the values, row-major. The first call computes them."""
        if self.made is None:
            self.made = self._same_storage() if self.op == "view" else None
            if self.made is None:
                self.made = self._run({"dtype": self.dtype})
            self.args, self.detail = (), None
            self.cost, self.scalars, self.arrays = 1, 0, frozenset([(id(self.made), row_major(self.shape), 0)])
            self.op = "made"
        return self.made

    @_alone
    def write(self, out: Array, place: View | None = None, accumulate: bool = False) -> None:
        """Write the values into (a part of) an array, or add them to it."""
        if self.op == "reduce" and place is not None:  # a place needs all axes, of which a reduction lacks some
            self.array()
        self._run({"out": out, "place": place, "accumulate": accumulate})

    def _same_storage(self) -> Array | None:
        """Return a device's view of the array, if it is contiguous and starts at an aligned offset, else None."""
        array, strides, offset = self.detail
        wanted = row_major(self.shape)
        same = all(n == 1 or s == w for n, s, w in zip(self.shape, strides, wanted))
        whole = offset % _VIEW_ALIGN == 0 and array.dtype == self.dtype
        return self.device.view(array, self.shape, offset) if same and whole else None

    def _run(self, options: dict[str, Any]) -> Array:
        source, shape = self, self.shape
        if self.op == "reduce":
            (source,), (kind, axes) = self.args, self.detail  # type: ignore[assignment]
            shape, options = source.shape, {**options, "reduce": kind, "axes": axes}
        program = _Program(shape)
        program.add(source)
        if not program.fits():  # an operand that was computed meanwhile is now read along with its own sources
            for arg in source.args:
                if isinstance(arg, Lazy):
                    arg.array()
            program = _Program(shape)
            program.add(source)
        given = tuple(program.instructions), tuple(program.arrays), tuple(program.views), tuple(program.scalars), shape
        made = self.device.fused(*given, **options)
        if self.op == "reduce" and "out" not in options and tuple(made.shape) != self.shape:  # keepdim
            made = self.device.view(made, self.shape)
        return made

    # ---- derived arrays ------------------------------------------------------------------
    @_alone
    def astype(self, dtype: Any) -> Lazy:
        """Return the same values, rounded to a float dtype when they are stored."""
        wanted = np.dtype(dtype)
        if wanted == self.dtype:
            return self
        if self.op in ("view", "made"):
            return apply("add", self, 0.0, dtype=wanted)
        return Lazy(self.op, self.args, self.shape, wanted, self.device, self.detail)

    @_alone
    def viewed(self, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> Lazy:
        """Return a view of the array that this one views, or of its own array."""
        source = self.detail[0] if self.is_view else self.array()
        return Lazy("view", (), tuple(shape), self.dtype, self.device, (source, tuple(strides), offset))

    @_alone
    def layout(self) -> View:
        """Return strides and offset in the array of which `viewed` takes a view."""
        return self.detail[1:] if self.is_view else (row_major(self.shape), 0)

    @_alone
    def permuted(self, axes: Sequence[int]) -> Lazy:
        strides, offset = self.layout()
        return self.viewed([self.shape[a] for a in axes], [strides[a] for a in axes], offset)

    @_alone
    def expanded(self, shape: tuple[int, ...]) -> Lazy:
        """Return the values broadcast to a shape."""
        if self.shape == shape:
            return self
        if not self.is_view and self.made is None:
            return Lazy("add", (self, 0.0), shape, self.dtype, self.device)
        strides, offset = self.layout()
        missing = len(shape) - len(self.shape)
        along = [0 if n == 1 else s for n, s in zip(self.shape, strides)]
        return self.viewed(shape, [0] * missing + along, offset)

    def __neg__(self) -> Lazy:
        return apply("neg", self)

    def __add__(self, other: Operand) -> Lazy:
        return apply("add", self, other)

    def __sub__(self, other: Operand) -> Lazy:
        return apply("sub", self, other)

    def __rsub__(self, other: float) -> Lazy:
        return apply("sub", other, self)

    def __mul__(self, other: Operand) -> Lazy:
        return apply("mul", self, other)

    def __truediv__(self, other: Operand) -> Lazy:
        return apply("div", self, other)

    __radd__, __rmul__ = __add__, __mul__

    def __rtruediv__(self, other: float) -> Lazy:
        return apply("div", other, self)


class _Program:
    """Instructions of `fused` for a Lazy over a shape, without repeated parts."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.instructions: list[tuple[Any, ...]] = []
        self.arrays: list[Array] = []
        self.views: list[View] = []
        self.scalars: list[float] = []
        self._known: dict[Any, int] = {}

    def fits(self) -> bool:
        return _within(len(self.arrays), len(self.shape)) and len(self.arrays) <= MOST_ARRAYS

    def add(self, value: Operand) -> int:
        """Return the number of the instruction whose result is a value."""
        key = ("number", value) if not isinstance(value, Lazy) else id(value)
        found = self._known.get(key)
        if found is None:
            instruction = self._instruction(value)
            found = self._known.get(instruction)
            if found is None:
                self.instructions.append(instruction)
                found = self._known[instruction] = len(self.instructions) - 1
            self._known[key] = found
        return found

    def _instruction(self, value: Operand) -> tuple[Any, ...]:
        if not isinstance(value, Lazy):
            self.scalars.append(float(value))
            return "scalar", len(self.scalars) - 1
        if value.op == "index" and value.shape[value.detail] == 1:  # it stays 0 if it is broadcast along the axis
            return self._instruction(0.0)
        if value.op == "index":
            return "index", value.detail + len(self.shape) - len(value.shape)
        if value.made is not None:
            return self._load(value, value.made, row_major(value.shape), 0)
        if value.op == "view":
            return self._load(value, *value.detail)
        if value.op == "reduce":
            return self._load(value, value.array(), row_major(value.shape), 0)
        return (value.op, *[self.add(arg) for arg in value.args])

    def _load(self, value: Lazy, array: Array, strides: Sequence[int], offset: int) -> tuple[Any, ...]:
        missing = len(self.shape) - len(value.shape)
        along = [0 if n == 1 else s for n, s in zip(value.shape, strides)]
        view = (*[0] * missing, *along), offset
        for number, (known, at) in enumerate(zip(self.arrays, self.views)):
            if known is array and at == view:
                return "load", number
        self.arrays.append(array)
        self.views.append(view)
        return "load", len(self.arrays) - 1


def memory_of(array: Array) -> Any:
    """Return an object that identifies the memory of an array."""
    if isinstance(array, np.ndarray):
        while isinstance(array.base, np.ndarray):
            array = array.base
        return array
    return array.lease


def view_of(array: Array, device: Device) -> Lazy:
    """Return a Lazy that is a whole array."""
    shape = tuple(array.shape)
    return Lazy("view", (), shape, np.dtype(array.dtype), device, (array, row_major(shape), 0))


def lazy_of(array: Array | Lazy, device: Device) -> Lazy:
    """Return an array or Lazy as a Lazy."""
    return array if isinstance(array, Lazy) else view_of(array, device)


def index(shape: tuple[int, ...], axis: int, device: Device, dtype: Any = np.float32) -> Lazy:
    """Return a Lazy of the coordinates along an axis."""
    return Lazy("index", (), shape, np.dtype(dtype), device, axis)


def apply(function: str, *args: Operand, dtype: np.dtype | None = None) -> Lazy:
    """Return an elementwise function (device/expression.py) of operands, which are broadcast."""
    lazies = [arg for arg in args if isinstance(arg, Lazy)]
    shape = broadcast(function, *(lazy.shape for lazy in lazies))
    device = lazies[0].device
    args = tuple(arg if isinstance(arg, Lazy) else float(arg) for arg in args)
    if dtype is None:
        dtype = _result_dtype(function, args)
    made = Lazy(function, args, shape, dtype, device)
    if _fits(made):
        return made
    for lazy in sorted(lazies, key=lambda lazy: -lazy.cost):
        lazy.array()
        made = Lazy(function, args, shape, dtype, device)
        if _fits(made):
            break
    return made


def _fits(lazy: Lazy) -> bool:
    few = lazy.cost <= MOST_INSTRUCTIONS and lazy.scalars <= _MOST_SCALARS and len(lazy.arrays) < MOST_ARRAYS
    return few and _within(len(lazy.arrays), len(lazy.shape))


def _within(arrays: int, axes: int) -> bool:
    return arrays < 4 or (arrays + 1) * (axes + 1) <= _MOST_VIEWED


def _result_dtype(function: str, args: Sequence[Operand]) -> np.dtype:
    """Return the dtype of a function: that of the floats among its operands, of which those without axes count only if
    there are no others; of whole numbers, int32 if the function keeps them whole, else float32; of a comparison,
    uint32."""
    if function in _COMPARISONS:
        return np.dtype(np.uint32)
    values = args[1:] if function == "where" else args
    dtypes = {value.dtype for value in values if isinstance(value, Lazy)}
    numbers = [value for value in values if not isinstance(value, Lazy)]
    if any(dtype.kind not in "iu" for dtype in dtypes):
        wide = {value.dtype for value in values if isinstance(value, Lazy) and value.shape}
        return joined_dtype(wide if any(dtype.kind not in "iu" for dtype in wide) else dtypes)
    whole = function in _WHOLE and dtypes and all(number.is_integer() for number in numbers)
    return np.dtype(np.int32 if whole else np.float32)


def joined_dtype(dtypes: Iterable[np.dtype]) -> np.dtype:
    """Return a dtype that holds the values of all: that of the floats, or the wider one of two floats."""
    found = set(dtypes)
    floats = {dtype for dtype in found if dtype.kind not in "iu"}
    if len(floats or found) == 1:
        return (floats or found).pop()
    if not floats:
        return np.dtype(np.int32)
    return np.dtype(np.float64 if np.dtype(np.float64) in floats else np.float32)


def broadcast(name: str, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape to which all shapes are broadcast. name: for errors."""
    if all(shape == shapes[0] for shape in shapes[1:]):
        return shapes[0]
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        listed = ", ".join(short(list(shape)) for shape in shapes)
        raise ShapeError(
            f"{name}: shapes {listed} cannot be broadcast; axes are matched from the last, and must be equal or 1"
        ) from None


def reduced(kind: str, x: Lazy, axes: Sequence[int], keepdim: bool) -> Lazy:
    """Return the sum or maximum over some axes."""
    if not axes:
        return x
    over = frozenset(axes)
    shape = tuple(1 if axis in over else n for axis, n in enumerate(x.shape) if keepdim or axis not in over)
    return Lazy("reduce", (x,), shape, x.dtype, x.device, (kind, tuple(sorted(over))))


def summed_to(x: Lazy, shape: tuple[int, ...]) -> Lazy:
    """Return the sum over the axes along which a shape was broadcast."""
    if x.shape == shape:
        return x
    missing = len(x.shape) - len(shape)
    axes = [a for a in range(len(x.shape)) if a < missing or (shape[a - missing] == 1 and x.shape[a] > 1)]
    total = reduced("sum", x, axes, keepdim=True)
    return _reshaped_reduce(total, shape)


def _reshaped_reduce(total: Lazy, shape: tuple[int, ...]) -> Lazy:
    """Return a reduction with another shape of the same size."""
    with _lock:
        if total.op == "reduce":
            return Lazy("reduce", total.args, shape, total.dtype, total.device, total.detail)
    return view_of(total.device.view(total.array(), shape), total.device)
