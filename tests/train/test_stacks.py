"""Stacked projections: loss, gradients, names and files are those of separate ones, with few launches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.train.trainers import documents, trainer_for
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.tensor import no_grad
from wgrad.train.data.packing import BatchStream
from wgrad.train.model.kv_cache import KVCache
from wgrad.train.model.load_config import parse_model_config
from wgrad.train.model.lora import Adapter, LoraConfig, init_lora, linear_modules, lora_shapes
from wgrad.train.model.model import Model
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.model_inputs import Inputs
from wgrad.train.model.stacks import GATE_UP, QKV, adapter_groups, stack_adapter, stack_if_last
from wgrad.train.model.weights import weight_specs
from wgrad.train.step.optim import AdamW, FlatParameters, ParameterSpec

TOKENS = 24
SIZES = {
    "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
}  # fmt: skip


def _config(**changed: Any) -> ModelConfig:
    raw = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 192,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 96,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu",
        "max_position_embeddings": 64, "attention_bias": True,
    }  # fmt: skip
    return parse_model_config(raw | changed)


def _model(device: Any, stacked: bool, lora: LoraConfig) -> tuple[Model, FlatParameters]:
    config, rng, weights = _config(), np.random.default_rng(5), {}
    for spec in weight_specs(config):
        value = rng.standard_normal(spec.shape).astype(np.float32) * (0.1 if len(spec.shape) > 1 else 1)
        array = device.upload(value)
        weights[spec.name] = device.quantize(array, double=True) if spec.kind == "projection" else array
        if stacked:
            stack_if_last(weights, spec.name, device)
    values = init_lora(lora_shapes(lora, linear_modules(config)), 0)
    groups = adapter_groups(values) if stacked else ()
    parameters = FlatParameters([ParameterSpec(n, v.shape) for n, v in values.items()], device, groups)
    for name, value in values.items():
        parameters.set(name, rng.standard_normal(value.shape).astype(np.float32) * 0.1)
    adapter = Adapter.from_tensors(lora, parameters.tensors)
    adapter = stack_adapter(adapter, parameters.joined) if stacked else adapter
    return Model(config, weights, device, adapter=adapter, positions=64), parameters


def _loss(model: Model, device: Any) -> float:
    ids = np.random.default_rng(1).integers(0, 96, TOKENS).astype(np.int32)
    inputs = Inputs(
        ids=device.upload(ids),
        positions=device.upload(np.arange(TOKENS, dtype=np.int32)),
        doc_start=device.upload(np.zeros((1, TOKENS), np.int32)),
        cache_len=device.upload(np.zeros(1, np.int32)),
        targets=device.upload(np.roll(ids, -1)),
    )
    loss = model.loss(inputs)
    loss.backward()
    return float(device.download(loss.data)[0])


@pytest.mark.parametrize(
    "lora, stacks",
    [
        (LoraConfig(r=8, alpha=16.0), 4),
        (LoraConfig(r=8, alpha=16.0, target_modules=("v_proj", "gate_proj", "up_proj")), 2),
        (LoraConfig(r=8, alpha=16.0, rank_pattern={"k_proj": 4}), 2),
    ],
    ids=["all", "some projections", "ranks that differ"],
)
def test_loss_and_gradients_are_those_of_each_projection_by_itself(lora: LoraConfig, stacks: int) -> None:
    _compare(ReferenceDevice(), lora, stacks)


def test_stacks_are_the_same_on_wgpu(wgpu_device: Any) -> None:
    _compare(wgpu_device, LoraConfig(r=8, alpha=16.0), 4)


@pytest.mark.parametrize("on_wgpu", [False, True], ids=["numpy", "wgpu"])
def test_decoding_is_that_of_each_projection_by_itself(on_wgpu: bool, request: pytest.FixtureRequest) -> None:
    """A prompt into a cache, then token after token, two rows at once."""
    device = request.getfixturevalue("wgpu_device") if on_wgpu else ReferenceDevice()
    ids = np.random.default_rng(2).integers(0, 96, (2, 9)).astype(np.int32)
    found = []
    for stacked in (False, True):
        model, _ = _model(device, stacked, LoraConfig(r=8, alpha=16.0))
        cache, outputs = KVCache.empty(model.config, 2, 12, np.float32, device), []
        for first, last in ((0, 6), (6, 7), (7, 8), (8, 9)):
            inputs = Inputs(
                ids=device.upload(ids[:, first:last].reshape(-1).copy()),
                positions=device.upload(np.tile(np.arange(first, last, dtype=np.int32), 2)),
                doc_start=device.upload(np.zeros((2, last - first), np.int32)),
                cache_len=device.upload(np.array([first], np.int32)),
            )
            with no_grad():
                outputs.append(device.download(model.hidden(inputs, cache).data))
        found.append(outputs)
    for plain, stack in zip(*found):
        np.testing.assert_allclose(stack, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_checkpointing": True, "max_grad_norm": 0.5, "gradient_accumulation_steps": 3}],
    ids=["", "2"],
)
def test_training_and_what_it_writes_are_those_of_projections_apart(
    options: dict[str, Any], wgpu_device: Any, make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that are recorded and replayed, and adapters under their own names."""
    folder, found = make_checkpoint(**SIZES), []
    for stacked in (False, True):
        monkeypatch.setattr(wgpu_device, "stacks_weights", stacked)
        trainer, built, config = trainer_for(folder, wgpu_device, max_steps=6, max_length=48, lora_r=8, **options)
        names = built.model.adapter.modules if built.model.adapter else {}
        assert any(name.endswith(GATE_UP) for name in names) == stacked
        assert any(GATE_UP in name for name in built.model.weights) == stacked
        for step in BatchStream(documents(), config):
            trainer.step(step, config.learning_rate)
        found.append((trainer.read_history()[:, 0], {n: built.parameters.get(n) for n in built.parameters.tensors}))
        kept = built.adapter(np.full(built.parameters.size, 3, np.float32))[1]  # those of a checkpoint, not the current
        assert kept.keys() == found[-1][1].keys() and all((value == 3).all() for value in kept.values())
    (losses, plain), (stacked_losses, other) = found
    assert losses.shape == (6,) and losses[-2:].mean() < losses[:2].mean()
    np.testing.assert_allclose(stacked_losses, losses, rtol=6 * 4 * float(np.finfo(np.float32).eps))
    assert list(plain) == list(other)
    for name, value in plain.items():
        assert np.linalg.norm(other[name] - value) <= 1e-3 * np.linalg.norm(value), name


def _compare(device: Any, lora: LoraConfig, stacks: int) -> None:
    (plain, alone), (stacked, joined) = (_model(device, on, lora) for on in (False, True))
    modules = stacked.adapter.modules if stacked.adapter else {}
    assert sum(name.endswith((QKV, GATE_UP)) for name in modules) == stacks
    assert _loss(stacked, device) == pytest.approx(_loss(plain, device), rel=1e-5)
    for name, tensor in alone.tensors.items():
        other, own = (device.download(t.gradient) for t in (joined.tensors[name], tensor))
        assert np.linalg.norm(other - own) <= 1e-4 * np.linalg.norm(own), name


def test_dropout_keeps_projections_apart() -> None:
    """Each adapter draws a mask of its own."""
    model, _ = _model(ReferenceDevice(), True, LoraConfig(r=8, alpha=16.0, dropout=0.1))
    assert model.adapter is not None and not any(name.endswith((QKV, GATE_UP)) for name in model.adapter.modules)


def test_a_checkpoint_does_not_know_of_groups() -> None:
    """The optimizer's arrays are written in the order that they have without, and read back from it."""
    device, lora = ReferenceDevice(), LoraConfig(r=8, alpha=16.0)
    states = []
    for stacked in (False, True):
        _, parameters = _model(device, stacked, lora)
        for number, tensor in enumerate(parameters.tensors.values()):
            device.fill(tensor.gradient, number + 1)
        optimizer = AdamW(parameters)
        optimizer.set_lr(0.1)
        optimizer.step()
        states.append(optimizer.state_arrays())
        again = AdamW(_model(device, stacked, lora)[1])
        again.load_state_arrays(states[-1])
        for name in parameters.tensors:
            np.testing.assert_array_equal(again.parameters.get(name), parameters.get(name))
    for name, value in states[0].items():
        np.testing.assert_allclose(states[1][name], value, rtol=1e-5, err_msg=name)
