"""State of the process that a case may leave changed for the next one: signals, variables, descriptors, hooks.

A command of its own process may leave them as it likes, since the process ends. `wgrad.finetune` in a user's program
may not, nor may a case here, because the cases of a child share it.
"""

from __future__ import annotations

import decimal
import gc
import locale
import logging
import os
import re
import resource
import signal
import socket
import sys
import tempfile
import threading
import warnings
from contextlib import suppress
from typing import Any

import numpy as np

from wgrad.train.data.template_process import shared_process

_LIMITS = {name: value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}
_HOOKS = ("excepthook", "unraisablehook", "displayhook", "breakpointhook", "stdin", "stdout", "stderr")
_OWN = ("RLIMIT_CPU", "RLIMIT_FSIZE")  # set for each case
_KEPT = re.compile(  # what opening a GPU, and serving, set up once for a process
    "variable (WGRAD_ADAPTERS_CHECKED|XDG_RUNTIME_DIR)|logger '(wgpu|uvicorn)"
)
_SECONDS = 2.0  # for a thread that is told to end


def state(streams: bool = True) -> dict[str, Any]:
    """Return what a case has to leave as it was, by name. streams: the standard ones, too."""
    folder = os.readlink("/proc/self/cwd")  # which may be gone
    found: dict[str, Any] = {"working folder": folder, "umask": _umask(), "locale": locale.setlocale(locale.LC_ALL)}
    found |= {f"signal {number}": signal.getsignal(number) for number in signal.valid_signals()}
    found["wake-up descriptor"] = _wakeup()
    found["timer"] = signal.getitimer(signal.ITIMER_REAL)
    found |= {f"variable {name}": value for name, value in os.environ.items()}
    found |= {name: resource.getrlimit(kind) for name, kind in _LIMITS.items() if name not in _OWN}
    found |= {f"descriptor {number}": target for number, target in _descriptors(streams).items()}
    found |= {f"thread {thread.name}": True for thread in _threads()}
    found |= {f"sys.{name}": getattr(sys, name) for name in (_HOOKS if streams else _HOOKS[:4])}
    found["threading.excepthook"] = threading.excepthook
    found["sys.path"], found["sys.meta_path"] = list(sys.path), list(sys.meta_path)
    found["recursion limit"], found["digits"] = sys.getrecursionlimit(), sys.get_int_max_str_digits()
    found["tracing"] = sys.gettrace(), sys.getprofile()
    found["garbage collector"] = gc.isenabled(), gc.get_threshold()
    found["warnings' filters"], found["showwarning"] = list(warnings.filters), warnings.showwarning
    found["NumPy's errors"], found["NumPy's call"] = np.geterr(), np.geterrcall()
    found["NumPy's printing"] = repr(np.get_printoptions())
    found["decimal"] = repr(decimal.getcontext())
    found["socket's timeout"], found["folder of tempfile"] = socket.getdefaulttimeout(), tempfile.tempdir
    return found | _logging()


def leftovers(before: dict[str, Any], streams: bool = True) -> str:
    """Return what has changed, by name; "": nothing."""
    changed = _changed(before, state(streams))
    if changed:
        for thread in _threads():
            if f"thread {thread.name}" not in before:
                thread.join(_SECONDS)
        gc.collect()  # of an exception's frames, which may hold files and threads
        changed = _changed(before, state(streams))
    return ", ".join(changed)


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    names = [name for name in names if not _KEPT.match(name)]
    return [f"{name} ({_shown(before.get(name))} before, {_shown(after.get(name))} now)" for name in names]


def _shown(value: Any) -> str:
    return str(value)[:120].replace("\n", " ")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _wakeup() -> int:
    descriptor = signal.set_wakeup_fd(-1)
    with suppress(ValueError, OSError):  # it may be closed
        signal.set_wakeup_fd(descriptor)
    return descriptor


def _descriptors(streams: bool) -> dict[int, str]:
    """Return the open ones and where each leads, without the listing's own and the worker's of templates."""
    worker = shared_process()._process
    apart = {file.fileno() for file in (worker.stdin, worker.stdout) if file} if worker else set()
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return {number: target for number, target in found.items() if number not in apart and (streams or number > 2)}


def _threads() -> list[threading.Thread]:
    """Return those that live, without the one that reads from the worker of templates."""
    return [thread for thread in threading.enumerate() if "(_read)" not in thread.name]


def _logging() -> dict[str, Any]:
    root = logging.getLogger()
    loggers = {"": root} | {k: v for k, v in logging.root.manager.loggerDict.items() if isinstance(v, logging.Logger)}
    said = {f"logger {name!r}": (v.level, v.disabled, v.propagate, list(v.handlers)) for name, v in loggers.items()}
    fresh: Any = (0, False, True, [])
    return {k: v for k, v in said.items() if v != fresh} | {"logging": logging.root.manager.disable}
