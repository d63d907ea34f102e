"""Objectives on preferences on the emulated GPU: the formulas of the papers, as on the other devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import random_weights, tiny_config, write_checkpoint
from tests.train.test_objectives import FORMULAS, check, trained, trainer_of


@pytest.mark.parametrize("options", FORMULAS, ids=lambda options: options["objective"])
def test_losses_are_those_of_the_formulas(options: dict, tmp_path: Path, emulator: Any) -> None:
    """One wave size suffices: every operator is compared on both."""
    device = emulator.device("gfx942")
    config = tiny_config(num_hidden_layers=1)
    folder = write_checkpoint(tmp_path / "model", config, random_weights(config))
    size = 5 if options["objective"] == "kto" else 2  # with both labels in it
    trainer, stream = trainer_of(folder, device, **{**options, "gradient_accumulation_steps": 1, "batch_size": size})
    trained(trainer, stream, 2)
    step = stream.get(2)
    trainer.step(step, 0.0)
    (row,) = trainer.read_history()
    check(trainer, step.batches, float(row[0]), trainer.metrics(row))
