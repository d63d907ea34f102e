"""Work of a test in another process, which may end at any line of it.

Children are forked from a server that has no device (`multiprocessing`'s fork server): a process forked from one with a
device has none of the driver's threads, and waits for them for ever once it collects the device as garbage.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

needs_fork = pytest.mark.skipif(
    "forkserver" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork"
)


def start(work: Callable[[], int], log: Path) -> BaseProcess:
    """Start `work`, a function of a module or a `partial` of one, which writes to `log`, and return its process.

    After `join()`, its `exitcode` is the result of `work`, or 99 if that raised.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "wgrad.train.run.finetune"])  # no child has to import them again
    process = context.Process(target=_work, args=(work, str(log)))
    process.start()
    return process


def run(work: Callable[[], int], log: Path) -> tuple[int, str]:
    """Run `work` as `start` does, and return its exit status and its output."""
    process = start(work, log)
    process.join()
    status = process.exitcode
    assert status is not None
    return status, log.read_text()


def _work(work: Callable[[], int], log: str) -> None:
    status = 99
    vars(os)["fsync"] = lambda descriptor: None  # as in the test's process (conftest.py)
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        try:
            status = work()
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
    finally:
        os._exit(status)
