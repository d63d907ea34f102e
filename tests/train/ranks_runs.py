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

LIMIT = 120  # seconds: a run that hangs is a red test
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
    """{'--lr': 1} -> ['--lr', '1']; of True the option alone."""
    pairs = ((key,) if value is True else (key, str(value)) for key, value in values.items())
    return [word for pair in pairs for word in pair]


def start(command: Sequence[str], **more: Any) -> subprocess.CompletedProcess[str]:
    environment = ENVIRONMENT | more.pop("environment", {})
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL, **more
    )


def finetune(ranks: int, values: dict[str, Any], *options: str) -> subprocess.CompletedProcess[str]:
    """The run of `values` (option -> value) as so many ranks; ranks 0: without mpirun. options: of mpirun."""
    launcher = mpirun(ranks, *options) if ranks else []
    return start([*launcher, sys.executable, "-m", "wgrad", "finetune", *words(values)])
