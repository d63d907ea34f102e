"""Errors of the HIP device. Each message says what failed, with which sizes, and what to do next."""


class DeviceError(RuntimeError):
    """The device cannot be used, or refused a piece of work."""


class NoCard(DeviceError):
    """hip-python, the driver or the card itself is missing: most likely this is no machine for HIP."""

    no_card = True  # read where this class cannot be imported (autograd/dispatch.py)


class OutOfMemory(DeviceError):
    """The device has no memory left for an array."""


class DeviceLost(DeviceError):
    """A kernel failed or the driver reset the device; everything on it is gone."""
