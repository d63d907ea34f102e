"""Families with experts, several keys of config.json at unusual values at once: logits, loss and gradients, also of the
load-balancing loss, against transformers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.families.common import BOTH
from tests.families.table import FAMILY_ROWS
from tests.train.conftest import distance
from tests.train.model_oracle import CORRECTION, ROWS, TOKENS, batch, full_model, load_oracle, make_inputs, torch
from tests.train.peft_oracle import as_theirs
from tests.train.tiny_models import tiny_config
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.contract import Device
from wgrad.train.model.balance import Balance
from wgrad.train.model.families import FAMILIES
from wgrad.train.model.load_config import parse_model_config

pytestmark = [pytest.mark.oracle, pytest.mark.all]

SEEDS = 2
NOISE = 1e-4  # gradients smaller than this part of the largest are rounding alone
COMMON: dict[str, list[Any]] = {
    "attention_bias": BOTH,
    "rms_norm_eps": [1e-2],
    "tie_word_embeddings": BOTH,
    "hidden_act": ["gelu_pytorch_tanh", "gelu", "quick_gelu", "relu", "relu2"],
}
WITH_EXPERTS = [name for name, row in FAMILY_ROWS.items() if row.unusual]  # each key is left out of half of the tests


def changes(architecture: str, seed: int) -> dict[str, Any]:
    """Return some keys of a family at unusual values, always the same for a seed."""
    row, draw = FAMILY_ROWS[architecture], random.Random(f"{architecture} {seed}")
    keys = {**COMMON, **row.unusual}
    found = {key: draw.choice(values) for key, values in keys.items() if draw.random() < 0.5}
    for key in row.never_unusual:
        found.pop(key, None)
    found |= {"output_router_logits": True, "router_aux_loss_coef": 0.7}
    return {**row.with_experts, **found}


def test_every_family_with_experts_is_here() -> None:
    found = {name for name in FAMILIES if parse_model_config(tiny_config(name)).experts is not None}
    assert found <= {*WITH_EXPERTS}


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("architecture", WITH_EXPERTS)
def test_unusual_keys_give_what_transformers_gives(architecture: str, seed: int, make_checkpoint: Any) -> None:
    folder = make_checkpoint(architecture, **changes(architecture, seed))
    device: Device = ReferenceDevice()
    theirs = load_oracle(folder)
    model, parameters = full_model(folder, device)
    ids, _ = batch(model.config.vocab_size, seed=seed)
    given = torch.tensor(ids.astype(np.int64))
    found = theirs(given, labels=given, attention_mask=torch.ones_like(given), use_cache=False)
    found.loss.backward()

    experts = model.config.experts
    if experts is not None and experts.balance:
        model.balance = Balance(experts.balance, experts, ids.size, device)
    targets = np.full_like(ids, -100)
    targets[:, :-1] = ids[:, 1:]
    inputs, count = make_inputs(device, ids, targets), ROWS * (TOKENS - 1)
    inputs.tables = model.token_tables(ids.size)
    if inputs.tables is not None:
        inputs.tables.write(device, np.tile(np.arange(TOKENS, dtype=np.int32), (ROWS, 1)), np.zeros_like(ids))
    logits = device.download(model.logits(model.hidden(inputs).data))
    assert distance(logits, found.logits.detach().numpy().reshape(logits.shape)) < 1e-5
    loss = model.loss(inputs)
    assert float(loss.numpy()[0]) / count == pytest.approx(float(found.loss.detach()), rel=1e-5)
    loss.backward()
    wanted = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    compared = 0
    for name, tensor in parameters.tensors.items():
        true = wanted.get(name)
        if true is None or name.endswith(CORRECTION) or float(true.abs().max()) < NOISE * largest:
            continue
        ours = torch.tensor(device.download(tensor.gradient) / count)
        assert distance(as_theirs(theirs, ours, true.shape).numpy(), true.numpy()) < 2e-4, name
        compared += 1
    assert compared > len(parameters.tensors) / 2
