"""--ranks on emulated AMD GPUs: where the GPU of one rank is lost, all processes start again, to the same bits."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hip.test_training import RESUME, finetune_options, make_checkpoint, text_data
from tests.train.ranks_runs import needs_mpi, start
from wgrad.hip.runtime.objects import serves, sources

__all__ = ["make_checkpoint", "text_data"]

# What rank 1 does first: it counts its launches, or has one of them go wrong, but not where it is started again.
BEGIN = """
import atexit, ctypes, os

if os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
    if os.environ["TEST_FAULT_AT"] == "0":
        count = lambda: str(ctypes.CDLL("libamdhip64.so").emulator_launches())
        atexit.register(lambda: open(os.environ["TEST_COUNT"], "w").write(count()))
    elif not os.environ.get("WGRAD_LOST_AT"):
        os.environ["WGRAD_EMULATED_FAULT_AT"] = os.environ["TEST_FAULT_AT"]
"""


@needs_mpi
@pytest.mark.all
def test_all_ranks_start_again_where_the_gpu_of_one_is_lost(
    emulator: Any, make_checkpoint: Any, text_data: Path, tmp_path: Path
) -> None:
    for source in filter(lambda path: serves(path, "gfx1100"), sources()):  # other processes find them built
        emulator.build(source.stem, "gfx1100")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(BEGIN)
    environment = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *sys.path]),
        "LD_LIBRARY_PATH": str(emulator.folder),
        "WGRAD_HIP_OBJECTS": str(emulator.folder),
        "WGRAD_EMULATED_ARCH": "gfx1100,gfx1100",
        "WGRAD_EMULATED_FAULTS": "report",
    }
    model, count, said = make_checkpoint(), tmp_path / "count", {}
    for name in ("whole", "again"):
        options = finetune_options(model, text_data, tmp_path / name)
        options[options.index("--gradient-accumulation-steps") + 1] = "2"
        command = [sys.executable, "-m", "wgrad", *options, "--ranks", "2", "--no-sample", "--eval-fraction", "0"]
        fault = int(count.read_text()) * 3 // 4 if count.exists() else 0
        run = start(command, environment=environment | {"TEST_FAULT_AT": str(fault), "TEST_COUNT": str(count)})
        assert run.returncode == 0, run.stderr[-3000:]
        said[name] = run.stdout
    assert "started again" not in said["whole"]
    assert said["again"].count("all ranks are started again") == 1 and "resuming from" in said["again"], said["again"]
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert (again / RESUME.WEIGHTS_FILE).read_bytes() == (whole / RESUME.WEIGHTS_FILE).read_bytes()
    assert RESUME.losses(again) == RESUME.losses(whole)
