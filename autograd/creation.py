"""Tensors of numbers, on a device by name or on the default one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from wgrad.autograd.host_arrays import as_dtype, to_device
from wgrad.autograd.random_numbers import generator
from wgrad.autograd.select_device import expressions, select_device
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Device, DType
from wgrad.device.errors import ShapeError

_devices: dict[str, Device] = {}
_default = ["auto"]


def set_default_device(device: str | Device) -> None:
    """Set where Tensors are made if no device is named.

    Args:
        device: A name (auto | wgpu | hip | cpu; wgpu and hip also with an index, as wgpu:1), or a device.

    Raises:
        DeviceUnavailable: the name is not known, or the device cannot be used here.
    """
    if not isinstance(device, str):
        _devices[device.name] = device
        device = device.name
    device_named(device)
    _default[0] = device


def device_named(device: str | Device | None) -> Device:
    """One device for each name, so that Tensors made apart can meet. None: the default."""
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
    """A Tensor of numbers, lists or a NumPy array, copied to the device.

    Args:
        data: Numbers. A Tensor is copied by way of the host.
        requires_grad: Whether `backward` computes its gradient.
        dtype: Of the Tensor; by default float32 for numbers with a fraction and float64, int32 for whole numbers.
        device: A name (auto | wgpu | hip | cpu), a device, or None for the default.

    Returns:
        Of the shape of `data`; later changes of `data` leave it as it is.

    Raises:
        WgradError: there are no numbers, or they are of a dtype that no Tensor has; or this is within a compiled step.
        ValueError: lists within `data` are of unequal lengths.
        DeviceUnavailable: the name is not known, or the device cannot be used here.
    """
    host = data.numpy() if isinstance(data, Tensor) else data
    where = device_named(device)
    return Tensor(to_device("tensor", host, where, dtype), where, requires_grad)


def _sizes(shape: tuple[Any, ...]) -> tuple[int, ...]:
    """Sizes that were given one by one, or as one sequence."""
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    if not all(isinstance(n, int | np.integer) and n > 0 for n in sizes):
        raise ShapeError(f"a shape is of positive whole numbers, got {list(sizes)}")
    return tuple(int(n) for n in sizes)


def zeros(
    *shape: int | Sequence[int],
    requires_grad: bool = False,
    dtype: DType = np.float32,
    device: str | Device | None = None,
) -> Tensor:
    """A Tensor of zeros.

    Args:
        shape: Sizes one by one, or as one sequence.
        requires_grad: Whether `backward` computes its gradient.
        dtype: A dtype of NumPy; float32 by default.
        device: A name (auto | wgpu | hip | cpu), a device, or None for the default.

    Returns:
        A Tensor of that shape and dtype.

    Raises:
        ShapeError: a size is not positive.
    """
    where = device_named(device)
    return Tensor(where.zeros(_sizes(shape), dtype), where, requires_grad)


def ones(
    *shape: int | Sequence[int],
    requires_grad: bool = False,
    dtype: DType = np.float32,
    device: str | Device | None = None,
) -> Tensor:
    """A Tensor of ones.

    Args:
        shape: Sizes one by one, or as one sequence.
        requires_grad: Whether `backward` computes its gradient.
        dtype: A dtype of NumPy; float32 by default.
        device: A name (auto | wgpu | hip | cpu), a device, or None for the default.

    Returns:
        A Tensor of that shape and dtype.

    Raises:
        ShapeError: a size is not positive.
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
    """A Tensor of one value.

    Args:
        shape: Sizes.
        value: Of each element.
        requires_grad: Whether `backward` computes its gradient.
        dtype: A dtype of NumPy; float32 by default.
        device: A name (auto | wgpu | hip | cpu), a device, or None for the default.

    Returns:
        A Tensor of that shape and dtype.

    Raises:
        ShapeError: a size is not positive.
    """
    where = device_named(device)
    array = where.empty(_sizes((shape,)), dtype)
    where.fill(array, as_dtype("full", np.asarray(value), array.dtype).item())
    return Tensor(array, where, requires_grad)


def zeros_like(x: Tensor, *, requires_grad: bool = False, dtype: DType = None) -> Tensor:
    """Zeros of the shape, dtype and device of another Tensor.

    Args:
        x: Whose shape, dtype and device it has.
        requires_grad: Whether `backward` computes its gradient.
        dtype: Another dtype of NumPy.

    Returns:
        A Tensor of x's shape, on its device.
    """
    return full(x.shape, 0.0, requires_grad=requires_grad, dtype=dtype or x.dtype, device=x.device)


def ones_like(x: Tensor, *, requires_grad: bool = False, dtype: DType = None) -> Tensor:
    """Ones of the shape, dtype and device of another Tensor.

    Args:
        x: Whose shape, dtype and device it has.
        requires_grad: Whether `backward` computes its gradient.
        dtype: Another dtype of NumPy.

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
    """The numbers from start to below end.

    Args:
        start: First number; with one argument, 0.
        end: The numbers stay below it.
        step: From a number to the next.
        requires_grad: Whether `backward` computes its gradient.
        dtype: By default int32 for whole numbers, else float32.
        device: A name (auto | wgpu | hip | cpu), a device, or None for the default.

    Returns:
        [n], where n is (end - start) / step, rounded up.
    """
    numbers = np.arange(*(start, end, step) if end is not None else (0, start, step))
    return tensor(numbers, requires_grad=requires_grad, dtype=dtype, device=device)


def linspace(
    start: float, end: float, steps: int, *, requires_grad: bool = False, device: str | Device | None = None
) -> Tensor:
    """Numbers in equal distances, the two ends among them, in float32.

    Args:
        start: First number.
        end: Last number.
        steps: How many there are.
        requires_grad: Whether `backward` computes its gradient.
        device: A name (auto | wgpu | hip | cpu), a device, or None for the default.

    Returns:
        float32 [steps].
    """
    return tensor(np.linspace(start, end, steps), requires_grad=requires_grad, device=device)


def eye(n: int, m: int | None = None, *, requires_grad: bool = False, device: str | Device | None = None) -> Tensor:
    """The identity matrix in float32.

    Args:
        n: Rows.
        m: Columns; n by default.
        requires_grad: Whether `backward` computes its gradient.
        device: A name (auto | wgpu | hip | cpu), a device, or None for the default.

    Returns:
        float32 [n, m]: ones where row and column are equal.
    """
    return tensor(np.eye(n, m, dtype=np.float32), requires_grad=requires_grad, device=device)


def randn(
    *shape: int | Sequence[int],
    scale: float = 1.0,
    requires_grad: bool = False,
    dtype: DType = None,
    device: str | Device | None = None,
) -> Tensor:
    """A Tensor of normal numbers.

    Args:
        shape: Sizes one by one, or as one sequence.
        scale: Standard deviation.
        requires_grad: Whether `backward` computes its gradient.
        dtype: A dtype of NumPy; float32 by default.
        device: A name (auto | wgpu | hip | cpu), a device, or None for the default.

    Returns:
        A Tensor of that shape and dtype. `manual_seed` makes it the same in each run.

    Raises:
        ShapeError: a size is not positive.
    """
    numbers = generator().standard_normal(_sizes(shape), np.float32) * np.float32(scale)
    return tensor(numbers, requires_grad=requires_grad, dtype=dtype, device=device)


def rand(*shape: int | Sequence[int], requires_grad: bool = False, device: str | Device | None = None) -> Tensor:
    """A Tensor of uniform numbers from 0 to below 1, in float32.

    Args:
        shape: Sizes one by one, or as one sequence.
        requires_grad: Whether `backward` computes its gradient.
        device: A name (auto | wgpu | hip | cpu), a device, or None for the default.

    Returns:
        float32 of that shape. `manual_seed` makes it the same in each run.

    Raises:
        ShapeError: a size is not positive.
    """
    return tensor(generator().random(_sizes(shape), np.float32), requires_grad=requires_grad, device=device)


def randint(low: int, high: int, shape: int | Sequence[int], *, device: str | Device | None = None) -> Tensor:
    """A Tensor of whole numbers, in int32.

    Args:
        low: The smallest.
        high: They stay below it.
        shape: Sizes.
        device: A name (auto | wgpu | hip | cpu), a device, or None for the default.

    Returns:
        int32 of that shape. `manual_seed` makes it the same in each run.

    Raises:
        ShapeError: a size is not positive.
    """
    return tensor(generator().integers(low, high, _sizes((shape,)), np.int32), device=device)
