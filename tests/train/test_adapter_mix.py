"""Several adapters in one batch: each sequence is as its own adapter alone has it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.train.growing_batches import alone, grow
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.contract import PAGE, Device
from wgrad.train.inference.continuous import Batch
from wgrad.train.inference.growing import Growing
from wgrad.train.inference.text_models import mixing_models
from wgrad.train.model import adapter_mix
from wgrad.train.model.adapter_mix import Loaded, can_mix, first_that_mix
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.lora import LoraConfig, linear_modules, lora_shapes
from wgrad.train.model.model import Model
from wgrad.train.options.generate_config import GREEDY
from wgrad.train.step.build import build_frozen


def models_for(folder: Any, device: Device, adapters: dict[str, Loaded | None]) -> dict[str, Model]:
    base = build_frozen(load_model_config(folder), folder, device, positions=256)
    return mixing_models(base, adapters)


def adapter(model: Any, seed: int, **options: Any) -> Loaded:
    rng = np.random.default_rng(seed)
    lora = LoraConfig(**{"r": 2, "alpha": 9.0, **options})
    shapes = lora_shapes(lora, linear_modules(load_model_config(model)))
    return lora, {n: rng.normal(0, 0.3, shape).astype(np.float32) for n, shape in shapes.items()}


def test_each_sequence_has_its_own_adapter(make_checkpoint: Any, device: Device) -> None:
    """Adapters have different ranks and modules, or are none; each model reads equal prompts for itself."""
    folder = make_checkpoint()
    adapters: dict[str, Loaded | None] = {
        "base": None,
        "all": adapter(folder, 1),
        "some": adapter(folder, 2, r=3, target_modules=("q_proj", "down_proj"), rank_pattern={"q_proj": 1}),
    }
    if not isinstance(device, ReferenceDevice):  # which has more kernels to compile
        del adapters["all"]
    models = models_for(folder, device, adapters)
    assert len({(id(model.cos), id(model.sin)) for model in models.values()}) == 1, "rotary tables are uploaded anew"
    batch, prompt = Batch(models["base"], 4), [*range(1, PAGE + 4)]
    names, most = ["base", "all", "some", "all"], 6
    if not isinstance(device, ReferenceDevice):
        names, most, prompt = ["base", "some"], 2, prompt[:4]
    members = [Growing.begin(prompt, most, GREEDY) for _ in names]
    for one, name in zip(members, names):
        one.model = models[name]
        assert batch.mixes(one.model)
    found = grow(batch, [(n // 2, one) for n, one in enumerate(members)], [1])
    assert found == [alone(models[name], prompt, most, GREEDY) for name in names]
    assert len({*map(tuple, found)}) == len({*names}), "they would be told apart"
    assert [one.shared for one in members] == [0, 0, 0, PAGE][: len(names)]


def test_steps_of_one_model_have_no_other_adapter(make_checkpoint: Any) -> None:
    folder, device = make_checkpoint(), ReferenceDevice()
    models = models_for(folder, device, {"base": None, "a": adapter(folder, 1), "b": adapter(folder, 2)})
    batch = Batch(models["base"], 2)
    batch.reserve(2, PAGE)
    first, second = (Growing.begin([n, 4], 9, GREEDY) for n in (1, 2))
    first.model, second.model = models["a"], models["b"]
    batch.join([first])
    batch.queue(1).tokens()
    batch.join([second])
    batch.queue(1).tokens()
    batch.leave(first)
    batch.queue(1).tokens()
    mixed = models["base"].mixed
    assert mixed is not None and [model for model, *_ in batch._steps] == [models["a"], mixed.model, models["b"]]


def test_what_is_more_than_low_rank_is_alone(make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lora, values = adapter(make_checkpoint(), 1)
    assert can_mix(lora, values)
    assert not can_mix(replace(lora, dora=True), values)
    assert not can_mix(replace(lora, target_parameters=("experts",)), values)
    assert not can_mix(lora, {**values, "model.norm.weight": values["model.layers.0.self_attn.q_proj.lora_A"]})
    many = {str(n): (lora, values) for n in range(4)}
    monkeypatch.setattr(adapter_mix, "MOST_RANKS", 5)
    assert first_that_mix({**many, "dora": (replace(lora, dora=True), values)}) == ["0", "1"]
