"""Models and adapters in transformers and PEFT, next to ours: logits, and steps of training side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.families.table import FAMILY_ROWS
from tests.tools import oracle_package
from tests.train.model_oracle import own_name
from wgrad.device.contract import Device
from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.train.data.packing import Batch, Step
from wgrad.train.model.families import FAMILIES
from wgrad.train.model.lora import LoraConfig, init_lora, lora_shapes
from wgrad.train.model.model import Model
from wgrad.train.model.model_inputs import Inputs
from wgrad.train.model.token_tables import TokenTables
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.run.schedule import learning_rate
from wgrad.train.step.build import TrainableModel, build_optimizer
from wgrad.train.step.trainer import Trainer

torch = oracle_package("torch")
transformers = oracle_package("transformers")
peft = oracle_package("peft")
Values = Callable[[Any, Any], np.ndarray]
TOKENS = 24
TURNED = {FAMILIES[name].model_type: row.turned for name, row in FAMILY_ROWS.items()}
NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def random_ids(rows: int = 1, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 300, (rows, TOKENS)).astype(np.int32)


def our_logits(model: Model, ids: np.ndarray) -> np.ndarray:
    device, flat = model.device, ids.reshape(-1)
    positions = np.tile(np.arange(ids.shape[1], dtype=np.int32), (len(ids), 1))
    tables = TokenTables.empty(model.config, ids.size, ids.shape[1], device)
    if tables is not None:
        tables.write(device, positions, np.zeros_like(ids))
    inputs = Inputs(
        ids=device.upload(flat),
        positions=device.upload(positions.reshape(-1)),
        doc_start=device.upload(np.zeros_like(ids)),
        cache_len=device.upload(np.zeros(1, np.int32)),
        tables=tables,
    )
    return device.download(model.logits(model.hidden(inputs).data))


def their_logits(model: Any, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor(ids.astype(np.int64)), use_cache=False).logits
    return logits.reshape(-1, logits.shape[-1]).double().numpy()


def their_base(folder: Path, dtype: Any = None) -> Any:
    options = {"experts_implementation": "eager"}  # the only one in float64
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or torch.float32, **options)


def save_random_lora(model: Any, folder: Path) -> Any:
    """Return a PEFT model whose LoRA matrices are now random, and save its adapter into a folder."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model


def random_adapter(lora: LoraConfig, modules: dict[str, tuple[int, int]]) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(5)
    values = init_lora(lora_shapes(lora, modules), 0)
    return {n: (0.2 * generator.standard_normal(v.shape)).astype(np.float32) for n, v in values.items()}


def bitsandbytes() -> Any:
    return pytest.importorskip("bitsandbytes", reason="the oracle is bitsandbytes: pip install wgrad[oracle]")


def dequantized_base(folder: Path, weights: dict[str, Any], device: Device) -> Any:
    """Return transformers' model with the decoded values of our quantized weights."""
    model = their_base(folder)
    state = {own_name(name): value for name, value in model.state_dict().items()}
    for name, weight in weights.items():
        if isinstance(weight, FrozenWeight):
            value = torch.tensor(device.download(device.dequantize(weight)))
            state[name].copy_(as_theirs(model, value, state[name].shape))
    return model


def as_theirs(model: Any, value: Any, shape: Any) -> Any:
    """Return our weight in transformers' layout: in some families [..., in, out]."""
    turned = TURNED.get(model.config.model_type)
    if turned == 2:
        return value.T
    if turned == len(shape) == 3:
        return value.reshape(shape[0], shape[2], shape[1]).transpose(1, 2)
    return value.reshape(shape)


STEPS = 30
ACCUMULATE = 2


def side_by_side(
    config: RunOptions,
    built: TrainableModel,
    theirs: Any,
    optimizer: Any,
    steps: int = STEPS,
    texts: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the losses of both models in a number of steps on the same data.

    optimizer: theirs; the "rate" of a group is its learning rate relative to that of the step. texts: ids, [any,
    TOKENS]; None: random ones.
    """
    ours = Trainer(built.model, build_optimizer(config, built.parameters), config)
    scale = float(built.model.device.download(ours.optimizer.loss_scale)[0])
    generator = np.random.default_rng(7)
    if texts is None:
        texts = generator.integers(0, 300, (8, TOKENS)).astype(np.int32)  # few, so that there is something to learn
    losses, found = [], []
    for index in range(steps):
        step = make_step(index, texts, generator, ACCUMULATE)
        lr = learning_rate(config, index, steps)
        with torch.autocast("cpu", dtype=torch.float16, enabled=config.compute == "float16"):
            losses.append(their_step(theirs, optimizer, step, lr, scale))
        ours.step(step, lr)
        found.append(ours.read_history()[0, 0])
    return np.array(found), np.array(losses)


def make_step(index: int, texts: np.ndarray, generator: np.random.Generator, accumulate: int) -> Step:
    """Return a step of micro-batches with unequal numbers of targets, for which a mean of means is another loss."""
    batches = []
    for number in range(accumulate):
        ids = texts[generator.permutation(len(texts))[:2]]
        targets = np.full_like(ids, -100)
        targets[:, :-1] = ids[:, 1:]
        targets[:, : 3 + 7 * number] = -100
        positions = np.tile(np.arange(TOKENS, dtype=np.int32), (2, 1))
        batches.append(Batch(ids, targets, positions, np.zeros_like(ids), int((targets >= 0).sum()), ids.size))
    return Step(index, 0, batches)


def their_step(model: Any, optimizer: Any, step: Step, lr: float, scale: float = 1.0) -> float:
    optimizer.zero_grad()
    total = 0.0
    for batch in step.batches:
        logits = model(torch.tensor(batch.ids.astype(np.int64)), use_cache=False).logits
        targets = torch.tensor(batch.targets.reshape(-1).astype(np.int64))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum", ignore_index=-100)
        (loss / step.num_targets * scale).backward()
        total += float(loss.detach()) / step.num_targets
    trained = [p for p in model.parameters() if p.grad is not None]  # a correction of a router's scores has none
    for parameter in trained:
        parameter.grad /= scale
    torch.nn.utils.clip_grad_norm_(trained, 0.5)
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("rate", 1)
    optimizer.step()
    return total
