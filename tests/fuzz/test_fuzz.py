"""The fuzzer in CI: what it once found, inputs of a fixed seed, and faults that it has to see."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.values import TREES, hostile

ROOT = Path(__file__).parents[2]
INPUTS, MORE_INPUTS = 120, 3000  # by default, and with --all

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children are watched through /proc")


def test_a_hostile_value_may_be_changed() -> None:
    """An input is the same whatever inputs were made before it."""
    before, rng = copy.deepcopy(TREES), Random(1)
    for _ in range(1000):
        value = hostile(rng)
        if isinstance(value, (list, dict)):
            value.clear()
    assert before == TREES


@pytest.mark.timeout(1200)
def test_mutants_are_seen_and_what_was_found_once_and_new_inputs_pass(pytestconfig: pytest.Config) -> None:
    """In one program, whose start takes seconds: children are forked from it, which a process with a device's threads
    must not do."""
    inputs = MORE_INPUTS if pytestconfig.getoption("--all") else INPUTS
    command = f"-m tests.fuzz --mutants --replay --inputs {inputs} --seconds 1100 --seed 20261122"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200
    )
    said = f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    assert done.returncode == 0, said
    for part in (" 0 misjudged", " 0 fail", "\n0 findings"):
        assert part in said, part
