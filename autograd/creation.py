"""Create Tensors on a device, given by name or by default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from wgrad.autograd.host_arrays import as_dtype, check_dtype, to_device
from wgrad.autograd.random_numbers import generator
from wgrad.autograd.select_device import expressions, select_device
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Device, DType
from wgrad.device.errors import ShapeError, WgradError
from wgrad.device.shown import short

_devices: dict[str, Device] = {}
_default = ["auto"]


def set_default_device(device: str | Device) -> None:
    """Set the device for new Tensors that name none.

    Args:
        device: A name (auto | wgpu | hip | cpu; wgpu and hip also with an index, such as wgpu:1), or a device.

    Raises:
        DeviceUnavailable: The name is unknown, or the device cannot be used here.
    """
    if not isinstance(device, str):
        _devices[device.name] = device
        device = device.name
    device_named(device)
    _default[0] = device


def device_named(device: str | Device | None) -> Device:
    """Return the device of a name, always the same object, so that Tensors can be combined. None: the default."""
    if device is not None and not isinstance(device, str):
        return device
    name = device or _default[0]
    if name not in _devices:
        chosen = select_device(name, needs=expressions)
        _devices[name] = _devices.setdefault(chosen.name, chosen) if name == "auto" else chosen
    return _devices[name]


def tensor(
    data: Any, *, requires_grad: bool = False, dtype: DType = None, device: str | Device | None = None
) -> Tensor:
    """Create a Tensor from numbers, lists or a NumPy array, which are copied to the device.

    Args:
        data: Numbers. A Tensor is copied through the host.
        requires_grad: Whether `backward` computes its gradient.
        dtype: Dtype of the Tensor; by default float32 for floating-point numbers, int32 for whole numbers.
        device: A name (auto | wgpu | hip | cpu), a device, or None for the default.

    Returns:
        A Tensor with the shape of `data`, which does not change with `data`.

    Raises:
        WgradError: There are no numbers, their dtype is not supported, or this is within a compiled step.
        ValueError: Lists in `data` have different lengths.
        DeviceUnavailable: The name is unknown, or the device cannot be used here.
    """
    host = data.numpy() if isinstance(data, Tensor) else data
    where = device_named(device)
    return Tensor(to_device("tensor", host, where, dtype), where, requires_grad)


def _sizes(shape: tuple[Any, ...]) -> tuple[int, ...]:
    """Return sizes that are given one by one, or as one sequence. ShapeError: one is not positive."""
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    if not all(isinstance(n, int | np.integer) and n > 0 for n in sizes):
        raise ShapeError(f"shape must have positive whole numbers, got {short(list(sizes))}")
    return tuple(int(n) for n in sizes)


def zeros(
    *shape: int | Sequence[int],
    requires_grad: bool = False,
    dtype: DType = np.float32,
    device: str | Device | None = None,
) -> Tensor:
    """Create a Tensor of zeros.

    Args:
        shape: Sizes one by one, or as one sequence.
        requires_grad: Whether `backward` computes its gradient.
        dtype: A dtype of NumPy; float32 by default.
        device: A name (auto | wgpu | hip | cpu), a device, or None for the default.

    Returns:
        A Tensor of that shape and dtype.

    Raises:
        ShapeError: A size is not positive.
    """
    where = device_named(device)
    return Tensor(where.zeros(_sizes(shape), check_dtype("zeros", dtype)), where, requires_grad)


def ones(
    *shape: int | Sequence[int],
    requires_grad: bool = False,
    dtype: DType = np.float32,
    device: str | Device | None = None,
) -> Tensor:
    """Create a Tensor of ones.

    Args:
        shape: Sizes one by one, or as one sequence.
        requires_grad: Whether `backward` computes its gradient.
        dtype: A dtype of NumPy; float32 by default.
        device: A name (auto | wgpu | hip | cpu), a device, or None for the default.

    Returns:
        A Tensor of that shape and dtype.

    Raises:
        ShapeError: A size is not positive.
    """
    return full(_sizes(shape), 1.0, requires_grad=requires_grad, dtype=dtype, device=device)


def full(
    shape: int | Sequence[int],
    value: float,
    *,
    requires_grad: bool = False,
    dtype: DType = np.float32,
    device: str | Device | None = None,
) -> Tensor:
    """Create a Tensor in which all elements have one value.

    Args:
        shape: Sizes.
        value: Value of each element.
        requires_grad: Whether `backward` computes its gradient.
        dtype: A dtype of NumPy; float32 by default.
        device: A name (auto | wgpu | hip | cpu), a device, or None for the default.

    Returns:
        A Tensor of that shape and dtype.

    Raises:
        ShapeError: A size is not positive.
    """
    where = device_named(device)
    array = where.empty(_sizes((shape,)), check_dtype("full", dtype))
    where.fill(array, as_dtype("full", np.asarray(value), array.dtype).item())
    return Tensor(array, where, requires_grad)


def zeros_like(x: Tensor, *, requires_grad: bool = False, dtype: DType = None) -> Tensor:
    """Create a Tensor of zeros with the shape, dtype and device of another Tensor.

    Args:
        x: The other Tensor.
        requires_grad: Whether `backward` computes its gradient.
        dtype: Dtype, if not that of x.

    Returns:
        A Tensor of x's shape, on its device.
    """
    return full(x.shape, 0.0, requires_grad=requires_grad, dtype=dtype or x.dtype, device=x.device)


def ones_like(x: Tensor, *, requires_grad: bool = False, dtype: DType = None) -> Tensor:
    """Create a Tensor of ones with the shape, dtype and device of another Tensor.

    Args:
        x: The other Tensor.
        requires_grad: Whether `backward` computes its gradient.
        dtype: Dtype, if not that of x.

    Returns:
        A Tensor of x's shape, on its device.
    """
    return full(x.shape, 1.0, requires_grad=requires_grad, dtype=dtype or x.dtype, device=x.device)


def arange(
    start: float,
    end: float | None = None,
    step: float = 1,
    *,
    requires_grad: bool = False,
    dtype: DType = None,
    device: str | Device | None = None,
) -> Tensor:
    """Create a Tensor with the numbers from start up to, but not including, end.

    Args:
        start: First number; with one argument, this is the end, and the first number is 0.
        end: End of the range, exclusive.
        step: Difference between two numbers.
        requires_grad: Whether `backward` computes its gradient.
        dtype: By default int32 for whole numbers, else float32.
        device: A name (auto | wgpu | hip | cpu), a device, or None for the default.

    Returns:
        [n], where n is (end - start) / step, rounded up.

    Raises:
        WgradError: step is 0, or there are no numbers.
    """
    if step == 0:
        raise WgradError("arange: step must not be 0; give the difference between two numbers")
    numbers = np.arange(*(start, end, step) if end is not None else (0, start, step))
    return tensor(numbers, requires_grad=requires_grad, dtype=dtype, device=device)


def linspace(
    start: float, end: float, steps: int, *, requires_grad: bool = False, device: str | Device | None = None
) -> Tensor:
    """Create a Tensor of evenly spaced numbers, including both ends, in float32.

    Args:
        start: First number.
        end: Last number.
        steps: Number of elements.
        requires_grad: Whether `backward` computes its gradient.
        device: A name (auto | wgpu | hip | cpu), a device, or None for the default.

    Returns:
        float32 [steps].

    Raises:
        ShapeError: steps is not positive.
    """
    (count,) = _sizes((steps,))
    return tensor(np.linspace(start, end, count), requires_grad=requires_grad, device=device)


def eye(n: int, m: int | None = None, *, requires_grad: bool = False, device: str | Device | None = None) -> Tensor:
    """Create an identity matrix in float32.

    Args:
        n: Rows.
        m: Columns; n by default.
        requires_grad: Whether `backward` computes its gradient.
        device: A name (auto | wgpu | hip | cpu), a device, or None for the default.

    Returns:
        float32 [n, m]: ones where row and column are equal.

    Raises:
        ShapeError: A size is not positive.
    """
    rows, columns = _sizes((n, n if m is None else m))
    return tensor(np.eye(rows, columns, dtype=np.float32), requires_grad=requires_grad, device=device)


def randn(
    *shape: int | Sequence[int],
    scale: float = 1.0,
    requires_grad: bool = False,
    dtype: DType = None,
    device: str | Device | None = None,
) -> Tensor:
    """Create a Tensor of normally distributed random numbers.

    Args:
        shape: Sizes one by one, or as one sequence.
        scale: Standard deviation.
        requires_grad: Whether `backward` computes its gradient.
        dtype: A dtype of NumPy; float32 by default.
        device: A name (auto | wgpu | hip | cpu), a device, or None for the default.

    Returns:
        A Tensor of that shape and dtype. `manual_seed` makes it reproducible.

    Raises:
        ShapeError: A size is not positive.
    """
    numbers = generator().standard_normal(_sizes(shape), np.float32) * np.float32(scale)
    return tensor(numbers, requires_grad=requires_grad, dtype=dtype, device=device)


def rand(*shape: int | Sequence[int], requires_grad: bool = False, device: str | Device | None = None) -> Tensor:
    """Create a Tensor of uniform random numbers in [0, 1), in float32.

    Args:
        shape: Sizes one by one, or as one sequence.
        requires_grad: Whether `backward` computes its gradient.
        device: A name (auto | wgpu | hip | cpu), a device, or None for the default.

    Returns:
        float32 of that shape. `manual_seed` makes it reproducible.

    Raises:
        ShapeError: A size is not positive.
    """
    return tensor(generator().random(_sizes(shape), np.float32), requires_grad=requires_grad, device=device)


def randint(low: int, high: int, shape: int | Sequence[int], *, device: str | Device | None = None) -> Tensor:
    """Create a Tensor of random whole numbers in [low, high), in int32.

    Args:
        low: Smallest number.
        high: End of the range, exclusive.
        shape: Sizes.
        device: A name (auto | wgpu | hip | cpu), a device, or None for the default.

    Returns:
        int32 of that shape. `manual_seed` makes it reproducible.

    Raises:
        ShapeError: A size is not positive.
        WgradError: low is not below high, or they are not within int32.
    """
    limits = np.iinfo(np.int32)
    if not limits.min <= low < high <= limits.max + 1:
        raise WgradError(
            f"randint: low must be below high, and both within int32; got {short(low)} and {short(high)}: give other "
            "limits"
        )
    return tensor(generator().integers(low, high, _sizes((shape,)), np.int32), device=device)
