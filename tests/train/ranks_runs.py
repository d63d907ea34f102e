"""Runs of `wgrad finetune` as several processes under mpirun, each with a limit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

LIMIT = 300  # seconds: a run that hangs is a red test
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
needs_mpi = pytest.mark.skipif(sys.platform == "win32", reason="mpirun is not in the test extra of this system")


def mpirun(ranks: int, *options: str) -> list[str]:
    found = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or "mpirun"
    return [found, "--oversubscribe", "--bind-to", "none", *options, "-n", str(ranks)]


def words(values: dict[str, Any]) -> list[str]:
    """Convert {'--learning-rate': 1} to ['--learning-rate', '1']. True gives the option alone, a list one per item."""
    single = [(key, v) for key, value in values.items() for v in (value if isinstance(value, list) else [value])]
    pairs = ((key,) if value is True else (key, str(value)) for key, value in single)
    return [word for pair in pairs for word in pair]


# Open MPI's launcher says so, seldom and on busy machines, and ends before any rank begins.
_NOT_STARTED = "The PMIx server's listener thread failed to start"


def start(command: Sequence[str], **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, once more where its launcher could not start."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": LIMIT, "stdin": subprocess.DEVNULL}
    options |= {"env": ENVIRONMENT | more.pop("environment", {}), **more}
    done = subprocess.run(command, **options)
    return subprocess.run(command, **options) if _NOT_STARTED in done.stderr else done


def command_of(ranks: int, values: dict[str, Any], *options: str, before: Sequence[str] = ()) -> list[str]:
    """Return the command of a run with so many ranks. options: of mpirun.

    before: Python code that each rank runs first, for example to set its host name (`named`).
    """
    rest = ["finetune", *words(values)]
    if not before:
        return [*mpirun(ranks, *options), sys.executable, "-m", "wgrad", *rest]
    assert len(before) == ranks
    run = "import sys; from wgrad.train.commands.cli import main; sys.exit(main(sys.argv[1:]))"
    programs = [["-n", "1", sys.executable, "-c", f"{line}\n{run}", *rest, ":"] for line in before]
    return [*mpirun(1, *options)[:-2], *sum(programs, [])[:-1]]


def named(host: str) -> str:
    """Return Python code that gives a rank another host name, so that it seems to be on another host."""
    return f"import socket; socket.gethostname = lambda: {host!r}"


def lossy(gaps: Sequence[int]) -> str:
    """Make that rank lose its device after so many calls, and so many more."""
    return f"""if 1:
        from tests.train.lossy_device import Front
        from wgrad.train.run import session
        front = Front({list(gaps)})
        session.select_device = lambda *_: front.device()
    """


def finetune(ranks: int, values: dict[str, Any], *options: str) -> subprocess.CompletedProcess[str]:
    """Run finetune with the options `values` on so many ranks; 0: without mpirun. options: of mpirun."""
    return start(
        command_of(ranks, values, *options) if ranks else [sys.executable, "-m", "wgrad", "finetune", *words(values)]
    )
