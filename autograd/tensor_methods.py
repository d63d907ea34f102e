"""The methods of a Tensor that PyTorch's users know. Each calls the function of its name that autograd/ops entered."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from wgrad.device.errors import ShapeError

if TYPE_CHECKING:
    from typing import Self

Function = TypeVar("Function", bound=Callable[..., Any])
_FUNCTIONS: dict[str, Callable[..., Any]] = {}
Axes = int | Sequence[int] | None


def implements_method(name: str) -> Callable[[Function], Function]:
    """Decorator of the function that a method calls."""

    def enter(function: Function) -> Function:
        _FUNCTIONS[name] = function
        return function

    return enter


class TensorMethods:
    """Arithmetic, comparisons, reductions, shapes and slices. Operands are broadcast to each other as in NumPy; numbers
    and NumPy arrays may stand beside a Tensor."""

    __slots__ = ()
    __array_priority__ = 1000  # an array of NumPy on the left leaves the operator to the Tensor on the right
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

    def __abs__(self) -> Self:
        return _call("abs", self)

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

    def silu(self) -> Self:
        return _call("silu", self)

    def gelu(self) -> Self:
        """The tanh form: torch's `gelu(approximate="tanh")`."""
        return _call("gelu", self)

    def to(self, dtype: Any) -> Self:
        """The same values in another dtype."""
        return _call("to", self, dtype)

    # ---- reductions ----------------------------------------------------------------------
    def sum(self, dim: Axes = None, keepdim: bool = False) -> Self:
        """Over one axis, several, or all."""
        return _call("sum", self, dim, keepdim)

    def mean(self, dim: Axes = None, keepdim: bool = False) -> Self:
        return _call("mean", self, dim, keepdim)

    def max(self, dim: Axes = None, keepdim: bool = False) -> Self:
        """The values alone: torch's `amax`. Equal ones share the gradient."""
        return _call("max", self, dim, keepdim)

    def softmax(self, dim: int = -1) -> Self:
        return _call("softmax", self, dim)

    # ---- shapes --------------------------------------------------------------------------
    def transpose(self, first: int, second: int) -> Self:
        """Two axes in each other's place."""
        return _call("transpose", self, first, second)

    def permute(self, *axes: int) -> Self:
        """All axes in another order."""
        return _call("permute", self, axes)

    @property
    def T(self) -> Self:
        """The axes in reverse order."""
        return _call("permute", self, tuple(reversed(range(self.ndim))))

    def expand(self, *shape: int) -> Self:
        """Axes of size 1, and new ones in front, repeated to a shape; -1 keeps an axis."""
        return _call("expand", self, shape)

    def unsqueeze(self, dim: int) -> Self:
        """A new axis of size 1."""
        return _call("unsqueeze", self, dim)

    def squeeze(self, dim: int | None = None) -> Self:
        """Without an axis of size 1, or all of them."""
        return _call("squeeze", self, dim)

    def flatten(self, start_dim: int = 0) -> Self:
        """The axes from one on made into one."""
        return _call("flatten", self, start_dim)

    def split(self, size: int | Sequence[int], dim: int = 0) -> tuple[Self, ...]:
        """Parts of `size` along an axis, of which the last may be smaller, or of the sizes of a list."""
        return tuple(_call("split", self, size, dim))

    def __getitem__(self, index: Any) -> Self:
        """Integers, slices of positive step, None and `...`; or a Tensor of int32, for rows."""
        return _call("getitem", self, index)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __bool__(self) -> bool:
        return bool(self.item())

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    # ---- values --------------------------------------------------------------------------
    def item(self) -> float:
        """The value of a Tensor of one element. Waits for the device."""
        if self.size != 1:
            raise ShapeError(f"item: a Tensor must have one element, got shape {list(self.shape)}; use numpy()")
        return float(self.numpy().reshape(-1)[0])

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    if TYPE_CHECKING:  # of the Tensor

        @property
        def shape(self) -> tuple[int, ...]: ...

        def numpy(self) -> np.ndarray: ...


def _call(name: str, *args: Any) -> Any:
    return _FUNCTIONS[name](*args)
