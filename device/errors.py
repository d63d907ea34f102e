"""Errors of wgrad. The command line prints a WgradError in one line and exits with status 2."""


class WgradError(Exception):
    """A user's mistake or a limit of the machine. The message is one complete line: what, the rule, what to do."""


class UnusableResult(WgradError):
    """The run's result is unusable: not finite, or nothing was trained. The command's status is 1."""


class CannotWrite(WgradError):
    """The system refused to write a file: the disk is full, the folder is read-only, and so on."""


class ShapeError(WgradError, ValueError):
    """An operator was given an argument of the wrong shape, dtype or value."""


class DeviceUnavailable(WgradError):
    """A device that was asked for by name cannot be used here."""


class DeviceError(RuntimeError):
    """The device cannot be used, or refused a piece of work."""


class OperatorMissing(DeviceError):
    """The device declares that it lacks an operator. operator: its name."""

    def __init__(self, device: str, operator: str) -> None:
        super().__init__(f"device {device} has no operator {operator}")
        self.operator = operator


class NoGpu(DeviceError):
    """The binding, the driver or the GPU itself is missing: most likely this is no machine for that device."""


class DoesNotFit(DeviceError):
    """Work is too large for the device; with a smaller batch, shorter sequences or other settings it may fit."""


class OutOfMemory(DoesNotFit):
    """The device has no memory left for an array."""


class TooLarge(DoesNotFit):
    """Work is beyond a limit of the device other than its memory, as of a binding's bytes or a launch's workgroups."""


class DeviceLost(DeviceError):
    """A kernel failed, or the driver reset or removed the device; everything on it is gone."""


class DeviceHung(DeviceLost):
    """The device does not finish its work; a call into its driver may never return."""


class NeedsNewProcess(DeviceLost):
    """The device was lost to this process, but a new one can open it. step: the saved step; 0: none.

    status: exit status of a command that is not restarted.
    """

    status = 75

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class CompileTimeout(DeviceError):
    """The driver does not return from compiling a kernel."""
