"""All use of wgpu-py's private names.

wgpu-py checks every argument in Python, which costs more than the call itself (43 us a dispatch against about 5 with
the foreign functions called directly, measured on an H100 host). Recording and submitting are therefore done on the raw
library (submission_queue.py). The names used are those of wgpu-py 0.32; pyproject.toml pins the minor version.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from cffi.model import ArrayType, PointerType  # type: ignore[import-untyped]

from wgrad.device.errors import DeviceError, DeviceLost, OutOfMemory
from wgrad.wgsl.runtime import matrix_units

with matrix_units.using_copy() as COPY_LOADED:  # wgpu finds its library while it is imported
    try:
        import wgpu
        from wgpu.backends import wgpu_native as _native
        from wgpu.backends.wgpu_native import _helpers as _instance
    except ModuleNotFoundError:
        raise
    except Exception as error:  # from cffi, or from wgpu-py's first call
        said = " ".join(str(error).split()).partition(". Additionally, ")[0][:200]  # cffi has searched, too
        named = os.environ.get("WGPU_LIB_PATH", "").strip()
        if named and not COPY_LOADED:
            raise DeviceError(
                f"WGPU_LIB_PATH: {named!r} cannot be loaded as wgpu's library ({said}): correct or unset it"
            ) from error
        raise DeviceError(f"wgpu's library cannot be loaded ({said}): pip install wgpu makes it anew") from error

lib = _native.lib
ffi = _native.ffi


class _Types(dict[str, Any]):
    """cffi's table of C types by their text, with a shortcut for a name followed by * or [].

    cffi parses such a text together with all names of the header. That takes 30 ms for each of about thirty types at
    the start of a run.
    """

    def __missing__(self, text: str) -> Any:
        found = re.fullmatch(r"(\w+) *(\*|\[\]) *", text)
        try:
            if found is None:
                raise KeyError(text)
            named, _ = ffi._parser._declarations[f"typedef {found[1]}"]
            with ffi._lock:
                made = PointerType(named) if found[2] == "*" else ArrayType(named, None)
                result = self[text] = ffi._get_cached_btype(made), False
        except (AttributeError, TypeError, ValueError):  # of another cffi, which then parses it
            raise KeyError(text) from None
        return result


with suppress(AttributeError):
    ffi._parsed_types = _Types(ffi._parsed_types)

LIBRARY = "wgpu-native " + ".".join(map(str, _native.lib_version_info))

# One recorded dispatch: pipeline and bind group handles, workgroup counts. Or a copy between two buffers: None, their
# handles, bytes of the source's offset, the target's, and to copy.
Dispatch = tuple[Any, Any, int, int, int]


def handle(obj: Any) -> Any:
    """The C handle of a wgpu-py object. Its owner must be kept alive by the caller."""
    return obj._internal


def disown(obj: Any) -> Any:
    """Take the C handle of a wgpu-py object, which then no longer releases it."""
    found, obj._internal = obj._internal, None
    return found


class ErrorLog(logging.Handler):
    """Collects what wgpu-py can only log: validation errors of raw calls, and a lost device."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._messages: list[str] = []
        self._apart = threading.local()
        logger = logging.getLogger("wgpu")
        logger.addHandler(self)
        logger.propagate = False

    @property
    def messages(self) -> list[str]:
        """The errors that this thread raises: its own if they are kept apart, else those of all other threads."""
        kept: list[str] = getattr(self._apart, "messages", self._messages)
        return kept

    def keep_apart(self) -> None:
        """Collect the errors that this thread causes, apart from other threads'."""
        self._apart.messages = []

    def emit(self, record: logging.LogRecord) -> None:
        # wgpu-py shortens a message that it has logged before; we want each in full.
        getattr(_native._api.error_handler._per_thread_data, "error_message_counts", {}).clear()
        message = record.getMessage()
        # Driver messages at instance creation are not our errors.
        if "XDG_RUNTIME_DIR" not in message and "EGL" not in message:
            self.messages.append(message)

    def raise_if_any(self, doing: str) -> None:
        if self.messages:
            text = " | ".join(self.messages)
            self.messages.clear()
            raise as_device_error(text, doing)


def as_device_error(error: Exception | str, doing: str) -> DeviceError:
    """Return wgpu's error as one of our classes, in one line. `doing` completes "... while"."""
    error_log().messages.clear()  # the same error is often logged as well
    text = " ".join(str(error).split())
    if "lost" in text.lower():
        return DeviceLost(
            f"the device was lost while {doing}: {text.rstrip('.')}. The driver reset it: often its watchdog, or "
            "another program on the GPU"
        )
    if "out of memory" in text.lower() or "OutOfMemory" in text:
        return OutOfMemory(f"the device ran out of memory while {doing}: {text}")
    return DeviceError(f"the device refused work while {doing}: {text}")


_error_log: ErrorLog | None = None


def error_log() -> ErrorLog:
    """The process-wide log (wgpu-py has one logger)."""
    global _error_log
    if _error_log is None:
        _error_log = ErrorLog()
    return _error_log


def enumerate_adapters(backends: Sequence[str]) -> list[Any]:
    """List the adapters of these backends (names of wgpu-native's flags)."""
    # Mesa writes a line to the terminal for each driver that it tries where this is not set, and never uses it here.
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())
    error_log()  # before the instance exists, so that driver chatter stays off the user's terminal
    if _instance._the_instance is None:
        _native.extras.set_instance_extras(backends=backends)
    return list(wgpu.gpu.enumerate_adapters_sync())


def copy(encoder: Any, buffers: tuple[Any, Any], source_offset: int, offset: int, nbytes: int) -> None:
    """Encode a copy from the first buffer to the second, by C handles."""
    source, target = buffers
    lib.wgpuCommandEncoderCopyBufferToBuffer(encoder, source, source_offset, target, offset, nbytes)


def record(compute_pass: Any, pipeline: Any, bind_group: Any, x: int, y: int, z: int) -> None:
    """Encode one dispatch into a pass made by wgpu-py, by C handles."""
    lib.wgpuComputePassEncoderSetPipeline(compute_pass._internal, pipeline)
    lib.wgpuComputePassEncoderSetBindGroup(compute_pass._internal, 0, bind_group, 0, ffi.NULL)
    lib.wgpuComputePassEncoderDispatchWorkgroups(compute_pass._internal, x, y, z)
