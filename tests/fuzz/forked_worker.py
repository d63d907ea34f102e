"""The process of chat templates and tokenizers, forked from a case's child instead of started.

It is the same code with the same limits. A start takes 0.14 s of computing, more than all else of most inputs; a fork
takes milliseconds, because what the process imports is there.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, BinaryIO, NoReturn
from unittest.mock import patch

from wgrad.train.data import template_process, template_worker

FRESH_BYTES = 27 << 20  # of address space: what a process of its own has taken when it limits itself


class ForkedWorker:
    """The part of subprocess.Popen that `template_process.py` uses."""

    def __init__(self, command: list[str], **streams: int) -> None:
        pipes: list[int] = []
        try:
            pipes += os.pipe()
            pipes += os.pipe()
            self.pid = os.fork()
        except OSError:  # as the system refuses it to a case
            for descriptor in pipes:
                os.close(descriptor)
            raise
        requests, to_worker, from_worker, answers = pipes
        if self.pid == 0:
            _serve(requests, answers)
        os.close(requests)
        os.close(answers)
        self.stdin: BinaryIO = open(to_worker, "wb")
        self.stdout: BinaryIO = open(from_worker, "rb")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        os.waitpid(self.pid, 0)


def _serve(requests: int, answers: int) -> NoReturn:
    status = 1
    try:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # a case may have none left
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
        os.dup2(requests, 0)
        os.dup2(answers, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the case's pipes among them: its end must be seen
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")
        template_worker.MEMORY += _address_space() - FRESH_BYTES
        template_worker.main(template_process.shared_process()._seconds)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def forked_workers() -> Iterator[None]:
    """Run templates and tokenizers in forked processes, within a `with`."""
    streams: dict[str, Any] = {"PIPE": subprocess.PIPE, "DEVNULL": subprocess.DEVNULL}
    with patch.object(template_process, "subprocess", SimpleNamespace(Popen=ForkedWorker, **streams)):
        yield
