"""PyTorch's methods that are combinations of those in tensor_methods.py, which gives them gradients too."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from wgrad.autograd.modes import is_readable
from wgrad.autograd.tensor_methods import Axes, TensorMethods, _call, axis_of
from wgrad.device.errors import ShapeError
from wgrad.device.shown import short

if TYPE_CHECKING:
    from typing import Self

_LARGEST = 3e38  # about the largest float32

Int: TypeAlias = int  # `int`, `float` and `bool` are methods below
Float: TypeAlias = float
Bool: TypeAlias = bool


class TorchMethods(TensorMethods):
    """Methods composed of those of TensorMethods."""

    __slots__ = ()

    # ---- dtypes and devices --------------------------------------------------------------
    def float(self) -> Self:
        return self.to(np.float32)

    def half(self) -> Self:
        return self.to(np.float16)

    def int(self) -> Self:
        """Cast to int32, rounding towards 0."""
        return self.to(np.int32)

    def long(self) -> Self:
        """Cast to int32: devices have no 64-bit integers."""
        return self.to(np.int32)

    def bool(self) -> Self:
        """Return a uint32 mask: 1 where the value is not 0."""
        return self.ne(0)

    def cpu(self) -> Self:
        """Copy to the cpu device, which computes with NumPy."""
        return self.to("cpu")

    def type_as(self, other: Any) -> Self:
        """Cast to the dtype of another Tensor; to a mask, as `bool` does."""
        return self.bool() if other.dtype == np.uint32 else self.to(other.dtype)

    # ---- functions of each element -------------------------------------------------------
    def square(self) -> Self:
        return self * self

    def rsqrt(self) -> Self:
        return 1.0 / self.sqrt()

    def reciprocal(self) -> Self:
        return 1.0 / self

    def log2(self) -> Self:
        return self.log() * (1 / math.log(2))

    def exp2(self) -> Self:
        return (self * math.log(2)).exp()

    def tan(self) -> Self:
        return self.sin() / self.cos()

    def clamp(self, min: Any = None, max: Any = None) -> Self:
        """Set values outside the bounds to the nearer bound. The gradient passes for values within or at a bound."""
        made = self if min is None else _call("where", self < min, min, self)
        return made if max is None else _call("where", made > max, max, made)

    clip = clamp

    def masked_fill(self, mask: Any, value: Float) -> Self:
        """Replace elements by `value` where the mask is not 0."""
        return _call("where", mask, value, self)

    def where(self, condition: Any, other: Any) -> Self:
        """Replace elements by those of `other` where the condition is 0."""
        return _call("where", condition, self, other)

    def lerp(self, end: Any, weight: Any) -> Self:
        """Return self + weight * (end - self), which is exactly `end` for a weight of 1."""
        if isinstance(weight, TensorMethods):
            return _call("where", weight < 0.5, self + (end - self) * weight, end - (end - self) * (1 - weight))
        return self + (end - self) * weight if weight < 0.5 else end - (end - self) * (1 - weight)

    # ---- reductions ----------------------------------------------------------------------
    def var(
        self, dim: Any = None, unbiased: Any = True, keepdim: Any = False, *, correction: Float | None = None
    ) -> Self:
        """Return the variance over axes.

        correction: subtracted from the number of elements in the divisor; by default 1, or 0 if not `unbiased`.
        """
        if dim is True or dim is False:
            dim, unbiased = None, dim
        return self._as_here(self._variance(dim, unbiased, keepdim, correction))

    def _variance(self, dim: Any, unbiased: Any, keepdim: Any, correction: Float | None) -> Self:
        x = self._wide()
        away = x - x.mean(dim, keepdim=True)
        total = (away * away).sum(dim, keepdim)
        count = self.size // max(total.size, 1)
        less = (1 if unbiased else 0) if correction is None else correction
        if count <= less:
            raise ShapeError(f"var: there must be more than {less} elements, got {count}; set correction=0")
        return total * (1.0 / (count - less))

    def _wide(self) -> Self:
        """Return 16-bit floats as float32, in which their squares do not overflow."""
        return self.float() if self.dtype.itemsize == 2 else self

    def _as_here(self, result: Self) -> Self:
        """Return the result of a computation with `_wide` in this Tensor's dtype."""
        return result.to(self.dtype) if self.dtype.itemsize == 2 else result

    def std(
        self, dim: Any = None, unbiased: Any = True, keepdim: Any = False, *, correction: Float | None = None
    ) -> Self:
        """Return the standard deviation over axes; arguments as in `var`."""
        if dim is True or dim is False:
            dim, unbiased = None, dim
        return self._as_here(self._variance(dim, unbiased, keepdim, correction)._root())

    def norm(self, p: Float = 2, dim: Axes = None, keepdim: Any = False) -> Self:
        """Return the 2-norm (p = 2), the sum of absolute values (1) or the largest absolute value (inf) over axes."""
        if p == 2:
            x = self._wide()
            return self._as_here((x * x).sum(dim, keepdim)._root())
        if p not in (1, math.inf):
            raise ShapeError(f"norm: p must be 1, 2 or inf, got {short(p)}")
        return self.abs().sum(dim, keepdim) if p == 1 else self.abs().amax(dim, keepdim)

    def _root(self) -> Self:
        """Return the square root, with gradient 0 (not infinity) where the value is 0."""
        zero = self.eq(0)
        return _call("where", zero, self, _call("where", zero, 1.0, self).sqrt())

    def any(self, dim: Axes = None, keepdim: Any = False) -> Self:
        """Return 1 where any value along the axes is not 0."""
        return self.ne(0).amax(dim, keepdim)

    def all(self, dim: Axes = None, keepdim: Any = False) -> Self:
        """Return 1 where every value along the axes is not 0."""
        return self.eq(0).amax(dim, keepdim).eq(0)

    def logsumexp(self, dim: Axes, keepdim: Any = False) -> Self:
        """Return log(sum(exp(x))) over axes."""
        x = self._wide()
        largest = x.detach().amax(dim, keepdim=True).clamp(-_LARGEST, _LARGEST)  # inf - inf would be NaN
        kept = self._as_here((x - largest).exp().sum(dim, keepdim=True).log() + largest)
        return kept if keepdim else kept.reshape(self.detach().amax(dim).shape)

    def log_softmax(self, dim: Int = -1) -> Self:
        return self - self.logsumexp(dim, keepdim=True)

    # ---- shapes --------------------------------------------------------------------------
    def view(self, *shape: Any) -> Self:
        return self.reshape(*shape)

    def view_as(self, other: Any) -> Self:
        return self.reshape(other.shape)

    def expand_as(self, other: Any) -> Self:
        return self.expand(*other.shape)

    def contiguous(self) -> Self:
        return self

    def clone(self) -> Self:
        """Copy into memory of its own."""
        return _call("clone", self)

    def t(self) -> Self:
        """Transpose a matrix."""
        if self.ndim > 2:
            raise ShapeError(f"t: a Tensor must have at most two axes, got shape {list(self.shape)}; use transpose")
        return self.T

    @property
    def mT(self) -> Self:
        """The Tensor with its last two axes exchanged."""
        return self.transpose(-1, -2)

    def swapaxes(self, first: Int, second: Int) -> Self:
        return self.transpose(first, second)

    def movedim(self, source: Int, destination: Int) -> Self:
        """Move an axis to another position; the others keep their order."""
        source, destination = (axis_of("movedim", axis, self.ndim) for axis in (source, destination))
        order = [axis for axis in range(self.ndim) if axis != source]
        return self.permute(*order[:destination], source, *order[destination:])

    def unflatten(self, dim: Int, sizes: Sequence[Int]) -> Self:
        """Split an axis into several axes of these sizes."""
        at = axis_of("unflatten", dim, self.ndim)
        return self.reshape(*self.shape[:at], *sizes, *self.shape[at + 1 :])

    def narrow(self, dim: Int, start: Int, length: Int) -> Self:
        """Return `length` positions of an axis from `start` on; a negative `start` counts from the end."""
        at = axis_of("narrow", dim, self.ndim)
        first = start + self.shape[at] if start < 0 else start
        if not 0 <= first < first + length <= self.shape[at]:
            raise ShapeError(
                f"narrow: start and start + length must lie within the axis of {self.shape[at]}, "
                f"got start {short(start)} and length {short(length)}"
            )
        return self[(slice(None),) * at + (slice(first, first + length),)]

    def select(self, dim: Int, index: Int) -> Self:
        return self[(slice(None),) * axis_of("select", dim, self.ndim) + (index,)]

    def index_select(self, dim: Int, index: Any) -> Self:
        """Return the positions of an axis that index (int32 [N]) lists."""
        return self[(slice(None),) * axis_of("index_select", dim, self.ndim) + (index,)]

    def unbind(self, dim: Int = 0) -> tuple[Self, ...]:
        """Return the slices along an axis, without that axis."""
        return tuple(part.squeeze(dim) for part in self.split(1, dim))

    def chunk(self, chunks: Int, dim: Int = 0) -> tuple[Self, ...]:
        """Split an axis into at most `chunks` parts of one size; the last may be smaller."""
        if chunks < 1:
            raise ShapeError(f"chunk: chunks must be positive, got {chunks}")
        return self.split(-(-self.shape[axis_of("chunk", dim, self.ndim)] // chunks), dim)

    def flip(self, *dims: Any) -> Self:
        """Reverse the order along axes."""
        given = dims[0] if len(dims) == 1 and isinstance(dims[0], Sequence) else dims
        axes = [axis_of("flip", dim, self.ndim) for dim in given]
        if len({*axes}) < len(axes):
            raise ShapeError(f"flip: dims must name an axis once, got {list(given)}")
        made = self
        for axis in axes:
            made = _call("reversed", made, axis)
        return made

    def roll(self, shifts: Any, dim: Axes = None) -> Self:
        """Rotate by `shifts` along axes; without an axis, rotate the flattened elements."""
        if dim is None:
            return self.flatten().roll(shifts, 0).reshape(self.shape)
        moved, axes = (list(x) if isinstance(x, Sequence) else [x] for x in (shifts, dim))
        if len(moved) != len(axes):
            raise ShapeError(f"roll: there must be a shift for each axis of {axes}, got {moved}")
        made = self
        for shift, axis in zip(moved, axes):
            made = _call("rotated", made, shift, axis_of("roll", axis, self.ndim))
        return made

    def repeat(self, *sizes: Any) -> Self:
        """Repeat the whole Tensor `sizes` times along each axis."""
        given = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes
        if len(given) < self.ndim:
            raise ShapeError(f"repeat: there must be a number for each axis of {list(self.shape)}, got {list(given)}")
        if min(given, default=1) < 1:
            raise ShapeError(f"repeat: numbers must be positive, got {list(given)}")
        shape = (1,) * (len(given) - self.ndim) + self.shape
        of_axes = [(times, size) if times > 1 and size > 1 else (times * size,) for times, size in zip(given, shape)]
        once = [(1, size) if len(of) > 1 else (size,) for of, size in zip(of_axes, shape)]
        wide = self.reshape([n for of in once for n in of]).expand(*(n for of in of_axes for n in of))
        return wide.reshape([times * size for times, size in zip(given, shape)])

    def tile(self, *sizes: Any) -> Self:
        given = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes
        return self.repeat(*(1,) * (self.ndim - len(given)), *given)

    def repeat_interleave(self, repeats: Int, dim: Int | None = None) -> Self:
        """Repeat each position of an axis `repeats` times; without an axis, each of the flattened elements."""
        if repeats < 1:
            raise ShapeError(f"repeat_interleave: repeats must be positive, got {repeats}")
        if dim is None:
            return self.flatten().repeat_interleave(repeats, 0)
        at = axis_of("repeat_interleave", dim, self.ndim)
        wide = self.unsqueeze(at + 1).expand(*self.shape[: at + 1], repeats, *self.shape[at + 1 :])
        return wide.reshape(*self.shape[:at], -1, *self.shape[at + 1 :])

    # ---- products ------------------------------------------------------------------------
    def mm(self, other: Any) -> Self:
        return self._of_axes("mm", 2, other) @ other

    def bmm(self, other: Any) -> Self:
        return self._of_axes("bmm", 3, other) @ other

    def dot(self, other: Any) -> Self:
        return self._of_axes("dot", 1, other) @ other

    def outer(self, other: Any) -> Self:
        return self._of_axes("outer", 1, other).unsqueeze(1) * other

    def _of_axes(self, name: str, rank: Int, other: Any) -> Self:
        found = [x.shape for x in (self, other) if len(getattr(x, "shape", (0,) * rank)) != rank]
        if found:
            raise ShapeError(f"{name}: operands must have {rank} axes, got shape {list(found[0])}; use @ or *")
        return self

    # ---- values --------------------------------------------------------------------------
    def __str__(self) -> str:
        if not is_readable():
            return repr(self)
        grad = ", requires_grad=True" if self.requires_grad else ""
        values = np.array2string(self.numpy(), separator=", ", prefix="Tensor(")
        return f"Tensor({values}, {self.dtype.name} on {self.device.name}{grad})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else str(self)

    @property
    def is_leaf(self) -> Bool:
        """Return whether no recorded operator computed this Tensor."""
        return self.node is None

    def dim(self) -> Int:
        return self.ndim

    def numel(self) -> Int:
        return math.prod(self.shape)

    def tolist(self) -> Any:
        return self.numpy().tolist()

    def copy_(self, values: Any) -> Self:
        """Overwrite the values of a parameter or constant in place, and return it."""
        return _call("copy_", self, values)

    def fill_(self, value: Float) -> Self:
        return self.copy_(value)

    def zero_(self) -> Self:
        return self.copy_(0.0)

    if TYPE_CHECKING:  # of the Tensor
        node: Any

        @property
        def dtype(self) -> np.dtype: ...

        def reshape(self, *sizes: Any) -> Self: ...

        def detach(self) -> Self: ...
