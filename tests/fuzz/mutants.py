"""Mutants of commands, and what the fuzzer must say of each: python -m tests.fuzz --mutants"""

from __future__ import annotations

import decimal
import gc
import io
import locale
import logging
import mmap
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import safetensors.numpy

import wgrad.train.commands.cli as cli
from tests.fuzz import execute
from tests.fuzz.case import Case
from tests.fuzz.execute import Sandbox
from tests.fuzz.judge import judge

Main = Callable[[list[str]], int]


def _say(text: str, status: int) -> int:
    print(text, file=sys.stderr)
    return status


def _raise(argv: list[str]) -> int:
    raise KeyError("no such key")


def _burn(argv: list[str]) -> int:
    while True:
        pass


def _wait(argv: list[str]) -> int:
    time.sleep(999)
    return 0


def _hold_memory(argv: list[str]) -> int:
    block = mmap.mmap(-1, 400 << 20)
    block.write(b"x" * (400 << 20))
    return 0


def _leave_partial(argv: list[str]) -> int:
    Path("out").mkdir()
    Path("out/adapter_config.json.77.partial").write_text("{")
    return 0


def _write_nan(argv: list[str]) -> int:
    Path("out").mkdir()
    safetensors.numpy.save_file({"a": np.array([np.nan], np.float32)}, "out/adapter_model.safetensors")
    return 0


def _write_result_and_fail(argv: list[str]) -> int:
    _write_nan(argv)
    return _say("wgrad: error: --learning-rate: too large", 2)


def _leave_a_process(argv: list[str]) -> int:
    subprocess.Popen(["sleep", "60"])
    return 0


def _leave_changed(argv: list[str]) -> int:
    """Change all that leftovers.py compares, in the order of `_LEFT`."""
    np.seterrcall(print)
    np.seterr(all="ignore")
    np.set_printoptions(precision=3)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    decimal.getcontext().prec = 7
    os.dup(0)
    sys.set_int_max_str_digits(5000)
    tempfile.tempdir = "/nowhere"
    gc.set_threshold(7)
    locale.setlocale(locale.LC_NUMERIC, "C.UTF-8")
    logging.getLogger("left").setLevel(7)
    logging.disable(7)
    sys.setrecursionlimit(1234)
    warnings.showwarning = print  # type: ignore[assignment]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    socket.setdefaulttimeout(7.0)
    sys.breakpointhook = sys.displayhook = sys.excepthook = sys.unraisablehook = print  # type: ignore[assignment]
    sys.meta_path.append(sys.meta_path[0])
    sys.path.append("/nowhere")
    sys.stdin, sys.stdout = io.StringIO(), io.StringIO()
    threading.Thread(target=threading.Event().wait, name="left", daemon=True).start()
    threading.excepthook = print
    signal.setitimer(signal.ITIMER_REAL, 500)
    sys.setprofile(lambda *_: None)
    os.umask(0o7)
    os.environ["LEFT"] = "1"
    signal.set_wakeup_fd(socket.socket().detach())
    warnings.simplefilter("error")
    os.chdir("/")
    return 0


_LEFT = (
    "NumPy's call", "NumPy's errors", "NumPy's printing", "RLIMIT_NOFILE", "decimal", r"descriptor \d+", "digits",
    "folder of tempfile", "garbage collector", "locale", "logger 'left'", "logging", "recursion limit", "showwarning",
    "signal 15", "socket's timeout", "sys.breakpointhook", "sys.displayhook", "sys.excepthook", "sys.meta_path",
    "sys.path", "sys.stdin", "sys.stdout", "sys.unraisablehook", "thread left", "threading.excepthook", "timer",
    "tracing", "umask", "variable LEFT", "wake-up descriptor", "warnings' filters", "working folder",
)  # fmt: skip


MUTANTS: dict[str, tuple[Main, str]] = {
    "exception": (_raise, "traceback: KeyError at mutants.py:.* in _raise"),
    "abort": (lambda argv: os.abort(), "crash: signal 6"),  # type: ignore[return-value]
    "endless loop": (_burn, "hang: no end after"),
    "waiting": (_wait, "hang: no end after"),
    "memory": (_hold_memory, "memory: [4-9][0-9]+ MiB"),
    "status 3": (lambda argv: 3, "status 3"),
    "status 1": (lambda argv: _say("wgrad: error: of no kind", 1), "status 1"),
    "error without a line": (lambda argv: 2, "0 error lines"),
    "two lines": (lambda argv: _say("oh\nwgrad: error: a", 2), "more than one line: oh"),
    "two errors": (lambda argv: _say("wgrad: error: a\nwgrad: error: b", 2), "2 error lines"),
    "warning": (lambda argv: _say("x.py:1: RuntimeWarning: overflow", 0), "noise on stderr"),
    "error and status 0": (lambda argv: _say("wgrad: error: a", 0), "status 0 with an error"),
    "long line": (lambda argv: _say("wgrad: error: " + "a" * 9999, 2), "an error of"),
    "half-written": (_leave_partial, "left half-written: adapter_config.json.N.partial"),
    "not finite": (_write_nan, "a result that is not finite was written"),
    "result and error": (_write_result_and_fail, "status 2, and yet there is adapter_model.safetensors"),
    "state left": (_leave_changed, "left changed: " + " .*, ".join(_LEFT) + " "),
    "process left": (_leave_a_process, "a process of it goes on running"),
}
SOUND: dict[str, Main] = {
    "sound": lambda argv: 0,
    "error": lambda argv: _say("wgrad: error: --learning-rate: must be above 0", 2),
    "note and error": lambda argv: _say("device: cpu\nwgrad: error: --learning-rate: must be above 0", 2),
    "unusable": lambda argv: _say("wgrad: error: the weights are not finite after step 3: lower --learning-rate", 1),
}


def _finding(box: Sandbox, main: Main) -> str:
    with patch.object(cli, "main", main):
        return box.run(Case(["finetune"], []), judge)[1] or ""


def misjudged(box: Sandbox) -> int:
    """Return the number of mutants that were not found, and of sound commands that were reported."""
    missed = 0
    usual = execute.CPU_SECONDS, execute.WAIT_SECONDS
    for name, (mutant, pattern) in MUTANTS.items():
        # Short for what never ends; nothing else may meet these limits, however busy the machine is.
        execute.CPU_SECONDS, execute.WAIT_SECONDS = (1, 1) if pattern.startswith("hang") else usual
        finding = _finding(box, mutant)
        if not re.match(pattern, finding):
            missed += 1
            print(f"{name}: expected {pattern!r}; got {finding!r}", flush=True)
    execute.CPU_SECONDS, execute.WAIT_SECONDS = usual
    for name, sound in SOUND.items():
        finding = _finding(box, sound)
        if finding:
            missed += 1
            print(f"{name}: nothing is wrong; got {finding!r}", flush=True)
    print(f"{len(MUTANTS)} mutants and {len(SOUND)} sound commands, {missed} misjudged")
    return missed
