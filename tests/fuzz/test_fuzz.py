"""The fuzzer in CI: what it once found, inputs of a fixed seed, and faults that it has to see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INPUTS, MORE_INPUTS = 120, 3000  # by default, and with --all

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children are watched through /proc")


def run(*words: str) -> None:
    """In a process of its own: children are forked from it, which a process with a device's threads must not do."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"


def test_mutants_are_seen() -> None:
    run("tests.fuzz.mutants")


@pytest.mark.timeout(1200)
def test_what_was_found_once_and_new_inputs(pytestconfig: pytest.Config) -> None:
    """In one program, whose start takes seconds."""
    inputs = MORE_INPUTS if pytestconfig.getoption("--all") else INPUTS
    run("tests.fuzz", "--replay", "--inputs", str(inputs), "--seconds", "1100", "--seed", "20261122")
