"""Keep the process alive when wgpu finds the device lost: the call panics, nobody catches that, and Rust aborts.

On Linux and macOS a handler of SIGABRT notifies the others and then stops the calling thread for ever. Such calls
are therefore made on a thread of their own (submit_thread.py). Every other abort ends the process as before. Windows
has no such signal: there the panic is a structured exception, which ctypes turns into an OSError.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from wgrad.wgsl.runtime.native import as_device_error, ffi, lib

_FOR_EVER = 1e8  # seconds
_WINDOWS = os.name == "nt"

_guarded: dict[int, Callable[[], None]] = {}  # by thread
_libc: Any = None
_previous: int | None = None


def guard_thread(aborted: Callable[[], None]) -> None:
    """Call `aborted` where this thread would abort the process. The thread then stops for ever."""
    if not _WINDOWS:
        _install()
        _guarded[threading.get_ident()] = aborted


def release_thread() -> None:
    """Stop guarding this thread."""
    _guarded.pop(threading.get_ident(), None)


def _install() -> None:
    global _libc, _previous
    if _libc is None:
        _libc = ctypes.CDLL(None)
        _libc.signal.argtypes, _libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        _previous = _libc.signal(signal.SIGABRT, ctypes.cast(_handler, ctypes.c_void_p))


@ctypes.CFUNCTYPE(None, ctypes.c_int)  # type: ignore[untyped-decorator]
def _handler(number: int) -> None:
    aborted = _guarded.pop(threading.get_ident(), None)
    if aborted is None:
        _libc.signal(number, _previous)
        getattr(_libc, "raise")(number)  # once this has returned
        return
    aborted()
    while True:
        time.sleep(_FOR_EVER)


@cache
def _by_ctypes(name: str) -> Any:
    """A function of wgpu's library, called by ctypes, which catches structured exceptions."""
    address = int(ffi.cast("uintptr_t", getattr(lib, name)))
    arguments = {
        "wgpuDevicePoll": (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p),
        "wgpuQueueSubmitForIndex": (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p),
    }[name]
    return ctypes.CFUNCTYPE(*arguments)(address)


def _call(name: str, doing: str, *arguments: Any) -> Any:
    if not _WINDOWS:
        return getattr(lib, name)(*arguments)
    plain = [int(ffi.cast("uintptr_t", a)) if isinstance(a, ffi.CData) else int(a) for a in arguments]
    try:
        return _by_ctypes(name)(*plain)
    except OSError as error:
        raise as_device_error("the device is lost", doing) from error


def poll(c_device: Any, index: Any = None, *, wait: bool) -> None:
    """Process what the device has finished; with `wait`, wait for the submission `index` (None: all)."""
    of = ffi.NULL if index is None else ffi.new("WGPUSubmissionIndex *", index)
    _call("wgpuDevicePoll", "waiting for the device", c_device, wait, of)


def submit(c_queue: Any, commands: Any) -> Any:
    """Submit one command buffer and return the index of the submission."""
    made = ffi.new("WGPUCommandBuffer[]", [commands])
    return _call("wgpuQueueSubmitForIndex", "submitting commands", c_queue, 1, made)
