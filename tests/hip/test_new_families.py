"""Models with experts, gated DeltaNet and Mamba-2 on the HIP device: two steps and some tokens, as NumPy has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.hip.test_training import LOOP, make_checkpoint
from wgrad.device.contract import Device
from wgrad.device.formats.gguf_quantize import rounded
from wgrad.train.inference.generation import generate_ids
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.qat import adapted
from wgrad.train.options.generate_config import GREEDY
from wgrad.train.step.build import build_frozen

__all__ = ["make_checkpoint"]
# Grouped GEMMs with LoRA and NF4; gated DeltaNet; Mamba-2; MXFP4's activation, biases of experts and sinks; a short
# convolution.
FAMILIES = (
    "Qwen3MoeForCausalLM",
    "Qwen3_5ForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "GptOssForCausalLM",
    "Lfm2ForCausalLM",
)
# Several streams; latent attention, corrected scores and exact GELU; experts whose input is scaled; LayerNorm of heads.
OTHERS = tuple(
    pytest.param(name, marks=pytest.mark.all)
    for name in ("Gemma3nForCausalLM", "DeepseekV3ForCausalLM", "Llama4ForCausalLM", "StableLmForCausalLM")
)
CHANGES = {"DeepseekV3ForCausalLM": {"hidden_act": "gelu"}, "StableLmForCausalLM": {"hidden_act": "relu"}}


@pytest.fixture
def device(emulator: Any) -> Any:
    yield emulator.device("gfx1100")
    emulator.clear()


def two_steps(folder: Any, device: Device, after_one: Any = None) -> tuple[Any, list[Any], list[Any]]:
    """Losses, gradients and parameters of two steps. after_one: parameters that the second begins with instead."""
    trainer, built, config = LOOP.trainer_for(folder, device, max_steps=2, gradient_accumulation_steps=1)
    gradients: list[Any] = []
    parameters: list[Any] = []
    update, tensors = trainer._update, built.parameters.tensors

    def observed(step: Any) -> None:
        gradients.append({name: device.download(tensor.gradient).copy() for name, tensor in tensors.items()})
        update(step)

    trainer._update = observed
    for step in LOOP.BatchStream(LOOP.documents(), config):
        trainer.step(step, config.learning_rate)
        parameters.append(LOOP.parameters_of(built))
        if after_one and len(parameters) == 1:
            for name, value in after_one.items():
                device.write(tensors[name].data, value)
    return trainer.read_history()[:, 0], gradients, parameters


@pytest.mark.parametrize("family", FAMILIES + OTHERS)
def test_two_steps_have_the_gradients_of_numpy(make_checkpoint: Any, device: Device, cpu: Device, family: str) -> None:
    """Every gradient of both steps, the second from the same parameters.

    AdamW divides by the gradient's own size: where one is 1e-6 of the others, its rounding is a rounding of the step.
    So parameters are compared where the gradient is not that small.
    """
    folder = make_checkpoint(family, **CHANGES.get(family, {}))
    losses, gradients, parameters = two_steps(folder, cpu)
    found = two_steps(folder, device, after_one=parameters[0])
    np.testing.assert_allclose(found[0], losses, rtol=1e-6)
    for step in (0, 1):
        for name, wanted in gradients[step].items():
            difference = np.abs(found[1][step][name] - wanted).max()
            assert difference <= 5e-5 * np.abs(wanted).max(), (step, name)
    for name, wanted in parameters[0].items():
        size = np.abs(gradients[0][name])
        counts = size >= 1e-3 * size.max()
        np.testing.assert_allclose(found[2][0][name][counts], wanted[counts], rtol=1e-5, atol=1e-8, err_msg=name)


@pytest.mark.parametrize("family", FAMILIES[:3])
def test_tokens_are_those_of_numpy(make_checkpoint: Any, device: Device, cpu: Device, family: str) -> None:
    """A prompt, then single tokens: one row of each expert, and the states of the delta rule and Mamba-2."""
    folder, found = make_checkpoint(family), []
    for where in (cpu, device):
        model = build_frozen(load_model_config(folder), folder, where, positions=32, quantize=False)
        found.append(list(generate_ids(model, [5, 17, 3, 99, 41, 7, 12, 8, 30, 2, 64], 5, GREEDY)))
    assert found[1] == found[0]


def test_weights_are_rounded_as_they_will_ship(make_checkpoint: Any, device: Device) -> None:
    """--qat: after some steps, each module's rounded weight is NumPy's of its weight and adapter, bit for bit."""
    folder = make_checkpoint(hidden_size=64, intermediate_size=96, head_dim=32, num_hidden_layers=1)
    options = {"max_steps": 2, "gradient_accumulation_steps": 1, "qat": "q4_0", "quantize": False}
    trainer, built, config = LOOP.trainer_for(folder, device, **options)
    for step in LOOP.BatchStream(LOOP.documents(), config):
        trainer.step(step, config.learning_rate)
    adapter, weights = built.model.adapter, built.model.weights
    assert adapter is not None
    for name, module in adapter.modules.items():
        assert np.any(device.download(module.b.data)) and module.rounded is not None
        sum_ = adapted(weights[f"{name}.weight"], module.a.data, module.b.data, module.scaling, device)
        for part, wanted in rounded(type(module.rounded), device.download(sum_)).arrays().items():
            found = getattr(module.rounded, part)
            np.testing.assert_array_equal(device.download(found), wanted, f"{name}.{part}")
