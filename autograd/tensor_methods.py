"""Methods of Tensors that PyTorch's users know. Each calls the function that autograd/ops registered for its name."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from wgrad.autograd.torch_names import instead_of_method
from wgrad.device.errors import ShapeError, WgradError
from wgrad.device.shown import short

if TYPE_CHECKING:
    from typing import Self

Function = TypeVar("Function", bound=Callable[..., Any])
_FUNCTIONS: dict[str, Callable[..., Any]] = {}
Axes = int | Sequence[int] | None


class Extremes(NamedTuple):
    """The largest or smallest values along an axis, and their indices in int32."""

    values: Any
    indices: Any


class Count(int):
    """A number of elements that can be called like PyTorch's `size`: `x.size()` is the shape, `x.size(dim)` a size."""

    shape: tuple[int, ...]

    def __call__(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]


def implements_method(name: str) -> Callable[[Function], Function]:
    """Decorate the function that a method calls."""

    def enter(function: Function) -> Function:
        _FUNCTIONS[name] = function
        return function

    return enter


def axis_of(name: str, dim: int, rank: int) -> int:
    """Return an axis as a number from 0; negative ones count from the end. ShapeError, naming the function: no axis."""
    if rank == 0:
        raise ShapeError(f"{name}: dim {short(dim)} is given, but the Tensor has no axes; reshape it to [1]")
    if isinstance(dim, bool) or not isinstance(dim, int | np.integer) or not -rank <= dim < rank:
        raise ShapeError(f"{name}: dim must be an axis of {rank}, from {-rank} to {rank - 1}, got {short(dim)}")
    return int(dim) % rank


class TensorMethods:
    """Arithmetic, comparisons, reductions, shapes and slices.

    Operands are broadcast as in NumPy; one of them may be a number or a NumPy array.
    """

    __slots__ = ()
    __array_priority__ = 1000  # a NumPy array on the left leaves the operator to the Tensor on the right
    __array_ufunc__ = None
    __hash__ = object.__hash__

    # ---- arithmetic ----------------------------------------------------------------------
    def __add__(self, other: Any) -> Self:
        return _call("add", self, other)

    def __radd__(self, other: Any) -> Self:
        return _call("add", other, self)

    def __sub__(self, other: Any) -> Self:
        return _call("sub", self, other)

    def __rsub__(self, other: Any) -> Self:
        return _call("sub", other, self)

    def __mul__(self, other: Any) -> Self:
        return _call("mul", self, other)

    def __rmul__(self, other: Any) -> Self:
        return _call("mul", other, self)

    def __truediv__(self, other: Any) -> Self:
        return _call("div", self, other)

    def __rtruediv__(self, other: Any) -> Self:
        return _call("div", other, self)

    def __pow__(self, other: Any) -> Self:
        return _call("pow", self, other)

    def __rpow__(self, other: Any) -> Self:
        return _call("pow", other, self)

    def __matmul__(self, other: Any) -> Self:
        return _call("matmul", self, other)

    def __rmatmul__(self, other: Any) -> Self:
        return _call("matmul", other, self)

    def __neg__(self) -> Self:
        return _call("neg", self)

    def __pos__(self) -> Self:
        return self

    def __abs__(self) -> Self:
        return _call("abs", self)

    add, sub, mul, div, pow, matmul, neg = __add__, __sub__, __mul__, __truediv__, __pow__, __matmul__, __neg__

    def __iadd__(self, other: Any) -> Self:
        return self._in_place("+=", self + other)

    def __isub__(self, other: Any) -> Self:
        return self._in_place("-=", self - other)

    def __imul__(self, other: Any) -> Self:
        return self._in_place("*=", self * other)

    def __itruediv__(self, other: Any) -> Self:
        return self._in_place("/=", self / other)

    def _in_place(self, name: str, result: Self) -> Self:
        """Return a new Tensor for the same name, or the changed parameter."""
        return _call("in_place", name, self, result)

    # ---- comparisons: 1 or 0 in uint32 ---------------------------------------------------
    def __lt__(self, other: Any) -> Self:
        return _call("lt", self, other)

    def __le__(self, other: Any) -> Self:
        return _call("le", self, other)

    def __gt__(self, other: Any) -> Self:
        return _call("gt", self, other)

    def __ge__(self, other: Any) -> Self:
        return _call("ge", self, other)

    def __eq__(self, other: Any) -> Self:  # type: ignore[override]
        return _call("eq", self, other)

    def __ne__(self, other: Any) -> Self:  # type: ignore[override]
        return _call("ne", self, other)

    lt, le, gt, ge, eq, ne = __lt__, __le__, __gt__, __ge__, __eq__, __ne__

    def __and__(self, other: Any) -> Self:
        """Return 1 where both comparisons are true."""
        return _call("both", self, other)

    def __or__(self, other: Any) -> Self:
        """Return 1 where at least one comparison is true."""
        return _call("either", self, other)

    def __invert__(self) -> Self:
        """Return 1 where a comparison is false."""
        return _call("both", self.eq(0), 1)

    __rand__, __ror__ = __and__, __or__

    # ---- functions of each element -------------------------------------------------------
    def exp(self) -> Self:
        return _call("exp", self)

    def log(self) -> Self:
        return _call("log", self)

    def sqrt(self) -> Self:
        return _call("sqrt", self)

    def abs(self) -> Self:
        return _call("abs", self)

    def sin(self) -> Self:
        return _call("sin", self)

    def cos(self) -> Self:
        return _call("cos", self)

    def relu(self) -> Self:
        return _call("relu", self)

    def tanh(self) -> Self:
        return _call("tanh", self)

    def sigmoid(self) -> Self:
        return _call("sigmoid", self)

    def sign(self) -> Self:
        """Return -1, 0 or 1, without a gradient."""
        return _call("sign", self)

    def silu(self) -> Self:
        return _call("silu", self)

    def gelu(self, approximate: str = "tanh") -> Self:
        """Return GELU in the tanh form, or with "none" the exact form, torch's default."""
        return _call("gelu_exact" if is_exact_gelu(approximate) else "gelu", self)

    def to(self, dtype: Any) -> Self:
        """Return the values in another dtype, or on another device."""
        return _call("to", self, dtype)

    # ---- reductions ----------------------------------------------------------------------
    def sum(self, dim: Axes = None, keepdim: bool = False) -> Self:
        """Return the sum over one axis, several, or all."""
        return _call("sum", self, dim, keepdim)

    def mean(self, dim: Axes = None, keepdim: bool = False) -> Self:
        return _call("mean", self, dim, keepdim)

    def amax(self, dim: Axes = None, keepdim: bool = False) -> Self:
        """Return the largest values. Equal ones share the gradient."""
        return _call("amax", self, dim, keepdim)

    def amin(self, dim: Axes = None, keepdim: bool = False) -> Self:
        """Return the smallest values. Equal ones share the gradient."""
        return -(-self).amax(dim, keepdim)

    def max(self, dim: Any = None, keepdim: bool = False) -> Any:
        """Return the largest value; with an axis, (values, indices); with a Tensor, the larger of both."""
        return self._extremes("max", "maximum", self.amax, self.argmax, dim, keepdim)

    def min(self, dim: Any = None, keepdim: bool = False) -> Any:
        """Return the smallest value; with an axis, (values, indices); with a Tensor, the smaller of both."""
        return self._extremes("min", "minimum", self.amin, self.argmin, dim, keepdim)

    def _extremes(self, name: str, of_two: str, values: Any, indices: Any, dim: Any, keepdim: bool) -> Any:
        if dim is None:
            return values()
        if isinstance(dim, TensorMethods):
            return _call(of_two, self, dim)
        if isinstance(dim, Sequence):
            raise ShapeError(f"{name}: dim must be one axis, got {list(dim)}; a{name} takes several")
        return Extremes(values(dim, keepdim), indices(dim, keepdim))

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Self:
        """Return the index of the largest value along an axis, or among all: the first of equal ones."""
        return _call("argmax", self, dim, keepdim)

    def argmin(self, dim: int | None = None, keepdim: bool = False) -> Self:
        """Return the index of the smallest value along an axis, or among all: the first of equal ones."""
        return _call("argmax", -self, dim, keepdim)

    def softmax(self, dim: int = -1) -> Self:
        return _call("softmax", self, dim)

    # ---- shapes --------------------------------------------------------------------------
    def transpose(self, first: int, second: int) -> Self:
        """Swap two axes."""
        return _call("transpose", self, first, second)

    def permute(self, *axes: Any) -> Self:
        """Reorder the axes."""
        return _call("permute", self, axes)

    @property
    def T(self) -> Self:
        """The Tensor with its axes reversed."""
        return _call("permute", self, tuple(reversed(range(self.ndim))))

    def expand(self, *shape: int) -> Self:
        """Repeat axes of size 1, and new ones in front, to a shape; -1 keeps an axis."""
        return _call("expand", self, shape)

    def unsqueeze(self, dim: int) -> Self:
        """Insert an axis of size 1."""
        return _call("unsqueeze", self, dim)

    def squeeze(self, dim: Axes = None) -> Self:
        """Remove one axis of size 1, several, or all."""
        return _call("squeeze", self, dim)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Self:
        """Merge consecutive axes into one."""
        return _call("flatten", self, start_dim, end_dim)

    def split(self, size: int | Sequence[int], dim: int = 0) -> tuple[Self, ...]:
        """Split an axis into parts of `size`, of which the last may be smaller, or of a list of sizes."""
        return tuple(_call("split", self, size, dim))

    def __getitem__(self, index: Any) -> Self:
        """Index with integers, slices with a positive step, None, `...`, and int32 arrays."""
        return _call("getitem", self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise WgradError(
            "a part of a Tensor cannot be assigned to; make a new one with wgrad.where(mask, value, x), masked_fill or "
            "wgrad.cat"
        )

    def gather(self, dim: int, index: Any) -> Self:
        """Return the values at indices (int32) along an axis."""
        return _call("gather", self, dim, index)

    def tril(self, diagonal: int = 0) -> Self:
        """Set values above a diagonal of the last two axes to 0."""
        return _call("tril", self, diagonal)

    def triu(self, diagonal: int = 0) -> Self:
        """Set values below a diagonal of the last two axes to 0."""
        return _call("triu", self, diagonal)

    def __len__(self) -> int:
        if not self.shape:
            raise ShapeError("a Tensor without axes has no length; use item()")
        return int(self.shape[0])

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ShapeError(f"a Tensor of shape {list(self.shape)} is neither true nor false; use any() or all()")
        return bool(self.item())

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    # ---- values --------------------------------------------------------------------------
    def item(self) -> Any:
        """Return the value of a Tensor with one element, as an int or float. Waits for the device."""
        if self.size != 1:
            raise ShapeError(f"item: a Tensor must have one element, got shape {list(self.shape)}; use numpy()")
        value = self.numpy().reshape(-1)[0]
        return int(value) if value.dtype.kind in "iu" else float(value)

    @property
    def size(self) -> Count:
        count = Count(np.prod(self.shape, dtype=np.int64))
        count.shape = self.shape
        return count

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a leaf with the same values in its own memory on the same device."""
        if not self.is_leaf:
            raise WgradError("deepcopy: the Tensor is a result on the tape; use detach() first")
        made: Self = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = made
        return made

    def __reduce__(self) -> Any:
        raise WgradError("a Tensor cannot be pickled; use wgrad.save_tensors, or pickle x.numpy()")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a Tensor has no {name!r}" + instead_of_method(name, type(self)))

    if TYPE_CHECKING:  # Tensor has them

        @property
        def shape(self) -> tuple[int, ...]: ...

        def numpy(self) -> np.ndarray: ...


def is_exact_gelu(approximate: str) -> bool:
    """Return whether GELU's exact form is asked for. Raises WgradError for an unknown value."""
    if approximate not in ("none", "tanh"):
        raise WgradError(f'gelu: approximate must be "tanh" or "none" (the exact form), got {approximate!r}')
    return approximate == "none"


def _call(name: str, *args: Any) -> Any:
    return _FUNCTIONS[name](*args)
