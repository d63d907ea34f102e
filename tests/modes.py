"""Modes of files that hold for root, too, as tests often run as root. Linux only."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_ABOVE_MODES = (1, 2)  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, which let root do what modes forbid


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Capabilities(ctypes.Structure):
    _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]


@contextmanager
def modes_count() -> Iterator[None]:
    """Let the modes of files hold for root as for any other user."""
    library = ctypes.CDLL(None, use_errno=True)
    header, before, now = _Header(0x20080522, 0), (_Capabilities * 2)(), (_Capabilities * 2)()
    library.capget(ctypes.byref(header), before)
    ctypes.memmove(now, before, ctypes.sizeof(before))
    now[0].effective &= ~sum(1 << number for number in _ABOVE_MODES)
    library.capset(ctypes.byref(header), now)
    try:
        yield
    finally:
        library.capset(ctypes.byref(header), before)
