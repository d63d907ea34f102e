"""Models with experts and with gated DeltaNet on the HIP device: two steps and some tokens, as NumPy has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.hip.test_training import LOOP, make_checkpoint
from wgrad.device.contract import Device
from wgrad.train.inference.generation import generate_ids
from wgrad.train.model.model_config import load_model_config
from wgrad.train.options.generate_config import GREEDY
from wgrad.train.step.build import build_frozen

__all__ = ["make_checkpoint"]
# Grouped GEMMs with LoRA and NF4; gated DeltaNet; MXFP4's activation, biases of experts and sinks; a short convolution.
FAMILIES = ("Qwen3MoeForCausalLM", "Qwen3_5ForCausalLM", "GptOssForCausalLM", "Lfm2ForCausalLM")


@pytest.fixture
def device(emulator: Any) -> Any:
    yield emulator.device("gfx1100")
    emulator.clear()


@pytest.mark.parametrize("family", FAMILIES)
def test_two_steps_beside_numpy(make_checkpoint: Any, device: Device, cpu: Device, family: str) -> None:
    folder, losses, weights = make_checkpoint(family), [], []
    for where in (cpu, device):
        trainer, built, config = LOOP.trainer_for(folder, where, max_steps=2, gradient_accumulation_steps=1)
        for step in LOOP.BatchStream(LOOP.documents(), config):
            trainer.step(step, config.learning_rate)
        losses.append(trainer.read_history()[:, 0])
        weights.append(LOOP.parameters_of(built))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
    far = {name: np.abs(weights[1][name] - value).max() / np.abs(value).max() for name, value in weights[0].items()}
    assert max(far.values()) < 1e-3, far


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_tokens_are_those_of_numpy(make_checkpoint: Any, device: Device, cpu: Device, family: str) -> None:
    """A prompt, then single tokens: one row of each expert, and the state of the delta rule."""
    folder, found = make_checkpoint(family), []
    for where in (cpu, device):
        model = build_frozen(load_model_config(folder), folder, where, positions=32, quantize=False)
        found.append(list(generate_ids(model, [5, 17, 3, 99, 41, 7, 12, 8, 30, 2, 64], 5, GREEDY)))
    assert found[1] == found[0]
