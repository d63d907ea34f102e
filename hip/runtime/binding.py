"""All access to hip-python: finding the package, and turning return codes into errors."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from typing import Any

from wgrad.device.bounded import TIMEOUT, bounded, timeout
from wgrad.device.errors import DeviceError, DeviceHung, DeviceLost, NoGpu, OutOfMemory

# hip-python 10 is rocm.bindings; older versions are `hip`, a name that the newer one still provides.
_PACKAGES = ("rocm.bindings", "hip")
_OLDER = "hip.hip"  # the module's name in packages before 10
_OUT_OF_MEMORY = 2
_NO_DEVICE = 100
NOT_READY = 600
# Values of hipError_t after which nothing works on the device any more: ECCNotCorrectable, IllegalState,
# IllegalAddress, LaunchTimeOut, Assert, LaunchFailure, Unknown. Older versions of ROCm return none of them for a fault
# of a kernel: they abort the process (docs/reference/exit-codes.md).
_FATAL = {214, 401, 700, 702, 710, 719, 999}

_SHORTEST_PAUSE, _LONGEST_PAUSE = 2e-5, 1e-3  # seconds between two polls by `_wait`
_SECONDS = 1800.0  # timeout of a wait: a stream may have many steps queued

_bindings: dict[str, Any] = {}
_thread = threading.local()


def hip() -> Any:
    """Return hip-python's `hip` module, after checking that its runtime works.

    Raises:
        NoGpu: hip-python, or the HIP runtime library, or a GPU is missing; the message says which.
        DeviceError: the driver is there and fails.
    """
    if "hip" not in _bindings:
        module = _import("hip")
        try:
            code, count = module.hipGetDeviceCount()
        except Exception as error:  # a RuntimeError of the loader; its text names the library
            raise NoGpu(
                "no HIP driver: hip-python is installed, but the runtime library (libamdhip64.so) cannot be opened;"
                f" install ROCm, or pip install rocm-sdk ({str(error)[:200]})"
            ) from error
        if int(code) == _NO_DEVICE or (int(code) == 0 and count == 0):
            raise NoGpu("the HIP driver finds no GPU; see `rocminfo`, and check that you may open /dev/kfd")
        if int(code) != 0:
            raise DeviceError(f"hipGetDeviceCount failed: {code}; see `rocminfo`")
        _bindings["hip"] = module
    return _bindings["hip"]


def hiprtc() -> Any:
    """Return hip-python's `hiprtc` module (the run-time compiler)."""
    if "hiprtc" not in _bindings:
        _bindings["hiprtc"] = _import("hiprtc")
    return _bindings["hiprtc"]


def device_count() -> int:
    """Return the number of GPUs that HIP finds."""
    return int(check(hip().hipGetDeviceCount(), "hipGetDeviceCount"))


def use_device(module: Any, index: int) -> None:
    """Make a GPU current in this thread: HIP starts each thread with GPU 0.

    module: `hip()`, also in the functions below.
    """
    if getattr(_thread, "device", None) != (module, index):
        check(module.hipSetDevice(index), f"HIP device {index}")
        _thread.device = module, index


def wait_for_stream(module: Any, stream: Any, what: str | Callable[[], str]) -> None:
    """Wait for all work of a stream while other Python threads run. Raises as `check` does."""
    _wait(module, "hipStreamSynchronize", "hipStreamQuery", stream, what)


def wait_for_event(module: Any, event: Any, what: str | Callable[[], str]) -> None:
    """Wait for an event while other Python threads run. Raises as `check` does."""
    _wait(module, "hipEventSynchronize", "hipEventQuery", event, what)


def _wait(module: Any, wait: str, query: str, handle: Any, what: str | Callable[[], str]) -> None:
    """Wait for `handle`; with hip-python before 10, which holds Python's GIL while it waits, by polling.

    Raises:
        DeviceHung: It took too long.
    """
    seconds = timeout(_SECONDS)

    def late() -> DeviceHung:
        said = what if isinstance(what, str) else what()
        return DeviceHung(
            f"the device hangs: {said} was not done in {seconds:.0f} s. If it is only slow, set "
            f"{TIMEOUT}={2 * seconds:.0f}"
        )

    ask = getattr(module, query)
    if getattr(module, "__name__", "") != _OLDER:
        # Finished work needs no thread.
        code = ask(handle)
        check(
            bounded(lambda: getattr(module, wait)(handle), seconds, late) if int(code[0]) == NOT_READY else code, what
        )
        return
    pause, waited = _SHORTEST_PAUSE, 0.0
    while int((code := ask(handle))[0]) == NOT_READY:
        if waited > seconds:
            raise late()
        time.sleep(pause)
        waited += pause
        pause = min(2 * pause, _LONGEST_PAUSE)
    check(code, what)


def device_properties(index: int) -> Any:
    """Return hipDeviceProp_t of a GPU. hip-python 10 returns it; older versions fill in an argument."""
    module, what = hip(), f"properties of HIP device {index}"
    try:
        return check(module.hipGetDeviceProperties(index), what)
    except TypeError:
        properties = module.hipDeviceProp_t()
        check(module.hipGetDeviceProperties(properties, index), what)
        return properties


def free_memory(module: Any, index: int) -> int | None:
    """Return the free bytes of a GPU's memory; None where HIP does not tell."""
    use_device(module, index)
    try:
        return int(check(module.hipMemGetInfo(), "hipMemGetInfo")[0])
    except (AttributeError, DeviceError):
        return None


def driver_version() -> int:
    """Return the driver's version in HIP's encoding, such as 70152802 for 7.1."""
    return int(check(hip().hipDriverGetVersion(), "hipDriverGetVersion"))


def runtime_version() -> int:
    """Return the version of the runtime library and of hiprtc, in HIP's encoding."""
    return int(check(hip().hipRuntimeGetVersion(), "hipRuntimeGetVersion"))


def package() -> str:
    """Return the name of hip-python's module, and its version where it tells one."""
    module = hip()
    return f"{module.__name__} {getattr(module, '__version__', '')}".strip()


def _import(name: str) -> Any:
    missing: ImportError | None = None
    for package in _PACKAGES:
        try:
            return importlib.import_module(f"{package}.{name}")
        except ImportError as error:
            missing = missing or error
    raise NoGpu(f"hip-python is not installed: pip install hip-python ({missing})") from missing


def check(result: tuple[Any, ...], what: str | Callable[[], str]) -> Any:
    """Return the values of a call into HIP without its return code: nothing, one, or a tuple.

    what: the action, for the message; a function where the text is costly to make.

    Raises:
        OutOfMemory, DeviceLost, DeviceError: The call's code was not hipSuccess.
    """
    code = int(result[0])
    if code == 0:
        return None if len(result) == 1 else result[1] if len(result) == 2 else result[1:]
    said = what if isinstance(what, str) else what()
    message = f"{said}: {getattr(result[0], 'name', code)} ({_text(result[0])})"
    if code == _OUT_OF_MEMORY:
        raise OutOfMemory(message)
    if code in _FATAL:
        raise DeviceLost(f"{message}; the GPU is lost to this process (HIP_LAUNCH_BLOCKING=1 names the kernel)")
    raise DeviceError(message)


def to_text(value: Any) -> str:
    """Decode a C string, which is bytes in some versions of hip-python and str in others."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _text(code: Any) -> str:
    try:
        text = _bindings["hip"].hipGetErrorString(code)
        return to_text(text[1] if isinstance(text, tuple) else text)
    except Exception:  # the message must not hide the error
        return "no description"
