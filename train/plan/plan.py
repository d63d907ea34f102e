"""Plan the shaders and memory of a run before it begins, by a dry run."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from wgrad.device.contract import Device
from wgrad.device.errors import DoesNotFit, OutOfMemory, WgradError
from wgrad.train.data.packing import Batch, Document, Example, Pair, Step, eval_batches
from wgrad.train.inference.generation import generate_ids
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.model import Model
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.model_files import open_files
from wgrad.train.model.streamed_weights import StreamedWeights
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.generate_config import GREEDY
from wgrad.train.plan.lengths import PROMPT_TOKENS, sample_positions, sample_tokens, within_positions
from wgrad.train.plan.memory_limit import beyond_limit, can_stream
from wgrad.train.step.build import build_optimizer, build_trainable
from wgrad.train.step.compute import compute_type
from wgrad.train.step.dequantized import Dequantized
from wgrad.train.step.find_model import find_model
from wgrad.train.step.memory import limit_bytes
from wgrad.train.step.resident import layer_bytes, plannable
from wgrad.train.step.search import planned_beside
from wgrad.train.step.trainer import Trainer

_BETWEEN_COLLECTIONS = 100_000  # objects; with Python's default of 700 a dry run takes a tenth longer
_FEW = 3  # tokens of a sample after which no others take other memory, unless all are read again


@dataclass(frozen=True)
class Plan:
    """Memory that a run needs.

    Attributes:
        dry: The dry run, for `Device.prepare`.
        held_bytes: On the device all the time: weights, trained parameters, gradients, optimizer.
        activation_bytes: On the device in addition while a step runs: activations and scratch.
        peak_bytes: Most on the device at any time, loading included.
        host_bytes: Most in main memory.
        host_weight_bytes: Weights in main memory: with --stream-weights, or an embedding that is no head.
        trained: Number of trained parameters.
        config: Options of the run, with --stream-weights settled.
        dequantized: Weights that are kept dequantized, which are part of `held_bytes`.
        token_bytes: Bytes that come from main memory to decode a token.
    """

    dry: Any
    held_bytes: int
    activation_bytes: int
    peak_bytes: int
    host_bytes: int
    host_weight_bytes: int
    trained: int
    config: RunOptions
    dequantized: Dequantized = Dequantized()
    token_bytes: int = 0

    @property
    def reserved_bytes(self) -> int:
        """Most bytes that the memory pool takes from the driver: `peak_bytes` and free memory between arrays."""
        reserved: int = self.dry.memory().peak_reserved_bytes
        return reserved

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of AdamW's two moments. The parameters take half of that, and so do their gradients."""
        return 8 * self.trained


def plan_run(
    config: RunOptions,
    model_config: ModelConfig,
    folder: str | os.PathLike[str],
    device: Device,
    prompt_tokens: int,
) -> Plan | None:
    """Plan a run by a dry run of loading, two steps, an evaluation and a sample; None: the device has no dry runs.

    The first step runs directly, the second is recorded. Shaders and memory depend only on shapes, so the data is one
    document that fills a sequence.

    Raises:
        WgradError: The base model does not fit its config.json, or the run does not fit --memory-limit.
    """
    most = limit_bytes(config.limit)

    def filled(found: Plan) -> Plan:
        """Keep as many streamed weights on the device as the limit allows, unless an option says how many."""
        streamed = found.config.stream_weights == "on" and not device.shared_memory
        if not streamed or most is None or found.config.resident_layers is not None:
            return found
        room = plannable(most)
        each = layer_bytes(found.host_weight_bytes, model_config)
        return fill_with_layers(found, each, model_config.num_hidden_layers, room, partial(fitting, room))

    def fitting(room: int, config: RunOptions) -> Plan | None:
        try:
            return plan(config, room)
        except DoesNotFit:
            return None

    def plan(config: RunOptions, limit: int | None) -> Plan:
        if config.stream_weights != "auto":
            return run_dry(config, model_config, folder, device, prompt_tokens, limit)
        off, room = replace(config, stream_weights="off"), limit or device.facts.get("memory_bytes")
        if not _may_stream(config, device) or room is None:
            return plan(off, limit)
        try:
            return plan(off, room)
        except OutOfMemory:
            pass
        try:
            return plan(replace(config, stream_weights="on"), room)
        except OutOfMemory:
            if limit is not None:
                raise
            return plan(off, None)  # free memory is not known: the device decides when it allocates

    if device.dry_run() is None:
        return None
    try:
        return filled(plan(config, most))
    except OutOfMemory:
        if config.limit is None:
            raise
    raise beyond_limit(config, device, model_config.num_hidden_layers, plan)


def fill_with_layers(
    found: Plan, each: float, layers: int, limit: int, fitting: Callable[[RunOptions], Plan | None]
) -> Plan:
    """Return a plan in which the weights of as many layers stay on the device as the limit allows.

    found: a plan with streamed weights. each: mean bytes of a layer's weights. layers: of the model. limit: bytes that
    a plan may take. fitting: plans a run; None where it does not fit.
    """
    there = found.config.resident_layers or 0

    def plan(resident: int) -> Plan | None:
        return found if resident == there else fitting(replace(found.config, resident_layers=resident))

    guess = there + max(int((limit - found.peak_bytes) / each), 0)
    return planned_beside(found, guess, plan, layers)


def _may_stream(config: RunOptions, device: Device) -> bool:
    """Return whether --stream-weights auto has a choice."""
    return config.gradient_checkpointing is not False and can_stream(config) and not device.shared_memory


def run_dry(
    config: RunOptions,
    model_config: ModelConfig,
    folder: str | os.PathLike[str],
    device: Device,
    prompt_tokens: int,
    limit: int | None,
) -> Plan:
    """Plan a run whose --stream-weights is settled. Raises DoesNotFit: beyond `limit` bytes, or another limit."""
    _check_input(config, model_config, device.dry_run(), limit)
    dry = device.dry_run()
    dry.limit_memory(limit)
    dry.repeats = True
    try:
        with _collecting_rarely():
            return _run_dry(config, model_config, folder, dry, prompt_tokens)
    except WgradError as error:  # its advice is not that for a limit, which the caller gives
        if limit is not None and isinstance(error.__cause__, OutOfMemory):
            raise error.__cause__ from None
        raise


@contextmanager
def _collecting_rarely() -> Iterator[None]:
    """Let Python look for reference cycles less often, as a dry run makes many objects and few of them."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], _BETWEEN_COLLECTIONS) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _check_input(config: RunOptions, model_config: ModelConfig, dry: Any, limit: int | None) -> None:
    """Raise OutOfMemory if not even a layer's input fits, before main memory is taken for sequences of any length."""
    dry.limit_memory(limit)
    dry.empty((config.rows * config.max_length, model_config.hidden_size), np.float32)


def training_needs(config: RunOptions) -> Callable[[Device], None]:
    """Return a check for `select_device` that a device has the operators of a run, by a dry run of short sequences.

    Long sequences need the same operators.
    """

    def check(device: Device) -> None:
        folder = find_model(config.model)
        _, model_config, _ = open_files(folder, load_model_config(folder))
        settled = replace(config, compute=compute_type(config.compute, device), stream_weights="off")
        short = replace(settled, max_length=min(config.max_length, PROMPT_TOKENS), vram=None, memory_limit=None)
        short, _ = within_positions(short, model_config)
        if device.dry_run() is not None:
            run_dry(short, model_config, folder, device, PROMPT_TOKENS, None)

    return check


def _run_dry(
    config: RunOptions, model_config: ModelConfig, folder: str | os.PathLike[str], dry: Any, prompt_tokens: int
) -> Plan:
    prompt_tokens = min(prompt_tokens, max(model_config.positions - 1, 1))
    positions = sample_positions(config, model_config, prompt_tokens)
    built = build_trainable(config, model_config, folder, dry, positions=positions, contents=False)
    trainer = Trainer(built.model, build_optimizer(config, built.parameters), config)
    held, loading = dry.memory().in_use_bytes, dry.memory().peak_bytes
    host_weights = dry.host_memory().in_use_bytes
    dry.reset_peak()
    document = Document(np.zeros(config.max_length, np.int32), np.ones(config.max_length, bool), label=1)
    example: Example = Pair(document, document) if config.objective_kind.records == "pairs" else document
    (batch,) = eval_batches([example] * config.batch_size, config)
    # First, as steps then find its free blocks, and with two batches, as the second finds others than the first.
    _measure(built.model, trainer, [batch] * 2, prompt_tokens, None if model_config.read_again_at else _FEW)
    for index in range(2):
        trainer.step(Step(index, 0, [batch]), config.learning_rate)
        trainer.read_history()
    _measure(built.model, trainer, [batch], prompt_tokens, _FEW)
    running = dry.memory().peak_bytes
    host, trained = dry.host_memory().peak_bytes, built.parameters.size
    sizes = held, running - held, max(loading, running), host, host_weights
    weights = built.model.weights
    token_bytes = weights.token_bytes if isinstance(weights, StreamedWeights) else 0
    return Plan(dry, *sizes, trained, config, trainer.dequantized, token_bytes)


def _measure(
    model: Model, trainer: Trainer, batches: list[Batch], prompt_tokens: int, tokens: int | None = None
) -> None:
    """Evaluate and sample, as a run does before and after its steps. tokens: of the sample to generate; None: all."""
    trainer.evaluate(batches)
    if trainer.config.sample:
        most = sample_tokens(prompt_tokens, model.config)
        with model.device.borrowing():
            for _ in islice(generate_ids(model, [0] * prompt_tokens, most, GREEDY), tokens):
                pass
