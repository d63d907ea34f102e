"""The training loop: weighing by tokens, recording, memory that stays, dropout, Ctrl-C."""

from __future__ import annotations

import gc
import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.trainers import documents, parameters_of, trainer_for
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.contract import Device
from wgrad.train.data.packing import BatchStream, eval_batches
from wgrad.train.inference.generation import generate_ids
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.generate_config import GREEDY
from wgrad.train.output.metrics import MetricsFile, read_metrics
from wgrad.train.run.loop import Run
from wgrad.train.terminal.interrupts import Interrupts
from wgrad.train.terminal.progress import TrainingProgress


def test_losses_fall_and_held_out_loss_with_them(make_checkpoint: Any, device: Device) -> None:
    trainer, _, config = trainer_for(make_checkpoint(), device, max_steps=20, learning_rate=1e-2)
    batches = eval_batches(documents(), config)
    before = trainer.evaluate(batches)
    for step in BatchStream(documents(), config):
        trainer.step(step, config.learning_rate)
    losses = trainer.read_history()[:, 0]
    assert losses.shape == (20,) and losses[-5:].mean() < 0.7 * losses[:5].mean()
    assert trainer.evaluate(batches) < 0.7 * before


def test_evaluation_is_the_mean_over_targets_whatever_the_batches(make_checkpoint: Any, device: Device) -> None:
    folder = make_checkpoint()
    means = []
    for size in (1, 4):
        trainer, _, config = trainer_for(folder, device, batch_size=size)
        batches = eval_batches(documents(), config)
        means.append(trainer.evaluate(batches))
    assert means[0] == pytest.approx(means[1], rel=1e-6)
    assert math.isnan(trainer.evaluate([]))


def test_what_is_measured_between_steps_changes_none_of_their_bits(make_checkpoint: Any, device: Device) -> None:
    """The steps are replayed, and the scratch of a measure must not be theirs."""
    folder, results = make_checkpoint(), []
    for measures in (False, True):
        trainer, built, config = trainer_for(folder, device, max_steps=5, lora_dropout=0.1)
        for step in BatchStream(documents(), config):
            trainer.step(step, config.learning_rate)
            if measures and step.index in (1, 2):
                assert trainer.evaluate(eval_batches(documents(5, seed=1), config)) > 0
                assert len(list(generate_ids(built.model, [5, 6], 9, GREEDY))) == 9
        results.append((trainer.read_history()[:, 0].tolist(), device.download(trainer.optimizer.parameters.data)))
    assert results[0][0] == results[1][0]
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_one_batch_of_eight_is_eight_batches_of_one(make_checkpoint: Any, device: Device) -> None:
    """Loss and gradient of a step do not depend on how its rows are split: tokens are weighed, not batches."""
    folder, results = make_checkpoint(), []
    for size, accumulate in ((8, 1), (1, 8), (2, 4)):
        trainer, built, config = trainer_for(
            folder, device, batch_size=size, gradient_accumulation_steps=accumulate, packing=False, max_grad_norm=0
        )
        step = BatchStream(documents(8), config).get(0)
        assert len(step.batches) == accumulate
        assert accumulate == 1 or len({b.num_targets for b in step.batches}) > 2  # a mean of means would differ
        trainer.step(step, 0.0)
        # exp_avg after one step is 0.1 times the gradient.
        results.append((trainer.read_history()[0, 0], device.download(trainer.optimizer.exp_avg)))
    loss, gradient = results[0]
    assert np.linalg.norm(gradient) > 1e-3
    for other_loss, other in results[1:]:
        assert other_loss == pytest.approx(loss, rel=1e-6)
        # The sums are the same in another order: a few roundings of float32.
        assert np.linalg.norm(other - gradient) <= 2.0**-23 * 32 * np.linalg.norm(gradient)


def test_every_matrix_moves(make_checkpoint: Any, device: Device) -> None:
    """lora_B after the first step; lora_A, whose gradient contains B = 0 then, after the second."""
    trainer, built, config = trainer_for(make_checkpoint("Qwen2ForCausalLM"), device)
    stream = BatchStream(documents(), config)
    start = parameters_of(built)
    assert len(start) == 2 * 2 * 7
    trainer.step(stream.get(0), 1e-3)
    first = parameters_of(built)
    for name, value in first.items():
        assert (value != start[name]).any() == name.endswith("lora_B"), name
    trainer.step(stream.get(1), 1e-3)
    for name, value in parameters_of(built).items():
        assert (value != first[name]).any(), name


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_checkpointing": True, "lora_dropout": 0.1}, {"full": True}, {"full": True, "compute": "float16"}],
)
def test_nothing_is_compiled_and_memory_does_not_grow_after_the_first_steps(
    options: dict[str, Any], make_checkpoint: Any, device: Device
) -> None:
    """Step 0 compiles and runs as it is, step 1 records; from there on nothing changes."""
    if options.get("compute") == "float16" and not device.float16:
        pytest.skip(f"{device.description} has no float16")
    trainer, _, config = trainer_for(make_checkpoint(), device, gradient_accumulation_steps=1, **options)
    stream = BatchStream(documents(), config)
    trainer.step(stream.get(0), 1e-3)
    device.synchronize()
    compiled = device.pipelines_compiled()
    trainer.step(stream.get(1), 1e-3)
    device.synchronize()
    after = device.memory()
    for index in range(2, 5):
        trainer.step(stream.get(index), 1e-3)
    device.synchronize()
    assert device.pipelines_compiled() == compiled
    memory = device.memory()
    assert memory.in_use_bytes <= after.in_use_bytes
    assert memory.reserved_bytes <= after.reserved_bytes


def test_a_replayed_step_is_the_step_itself(make_checkpoint: Any, device: Device) -> None:
    """The same batches through fresh trainers, one of them never recording: equal to the bit."""
    folder, results = make_checkpoint(), []
    for record in (True, False):
        trainer, built, config = trainer_for(folder, device, lora_dropout=0.2, gradient_checkpointing=True)
        if not record:
            trainer._micro_step = trainer._update = lambda work, submitted=None: work()  # type: ignore[assignment, misc]
        stream = BatchStream(documents(), config)
        for index in range(4):
            trainer.step(stream.get(index), 1e-3)
        results.append((trainer.read_history(), parameters_of(built)))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    for name, value in results[0][1].items():
        np.testing.assert_array_equal(value, results[1][1][name])


def test_dropout_follows_the_seed_and_is_off_in_evaluation(make_checkpoint: Any, device: Device) -> None:
    folder = make_checkpoint()

    def run(seed: int, dropout: float) -> tuple[np.ndarray, float]:
        trainer, built, config = trainer_for(folder, device, lora_dropout=dropout, seed=0)
        for name in built.parameters.tensors:  # B = 0 would hide the dropout
            built.parameters.set(name, np.full(built.parameters.tensors[name].shape, 0.05, np.float32))
        held_out = trainer.evaluate(eval_batches(documents(4), config))
        object.__setattr__(config, "seed", seed)
        step = BatchStream(documents(), RunOptions(**(config.to_dict() | {"seed": 0}))).get(0)
        trainer.step(step, 1e-3)
        return trainer.read_history()[:, 0], held_out

    first, held_out = run(1, 0.3)
    np.testing.assert_array_equal(first, run(1, 0.3)[0])
    assert first[0] != run(2, 0.3)[0][0] != run(1, 0.0)[0][0]
    assert held_out == run(1, 0.0)[1]


@pytest.mark.parametrize("short", ["float16", "bfloat16"])
def test_16_bits_follow_float32_as_closely_as_plain_ones(make_checkpoint: Any, device: Device, short: str) -> None:
    """Twelve steps in 16 bits, beside float32 and 16 bits in NumPy."""
    if not getattr(device, short):
        pytest.skip(f"{device.description} has no {short}")
    folder = make_checkpoint()

    def losses(where: Device, compute: str) -> np.ndarray:
        trainer, _, config = trainer_for(folder, where, compute=compute, max_steps=12)
        for step in BatchStream(documents(), config):
            trainer.step(step, config.learning_rate)
        history = trainer.read_history()
        assert np.isfinite(history).all()
        return history[:, 0]

    true, plain, ours = (
        losses(ReferenceDevice(), "float32"),
        losses(ReferenceDevice(), short),
        losses(device, short),
    )
    assert 0 < np.abs(plain - true).max() < (0.01 if short == "float16" else 0.02) * true.max()
    assert np.abs(ours - true).max() <= 3 * np.abs(plain - true).max()


# ---- Run ---------------------------------------------------------------------------------------
class Stopper(TrainingProgress):
    """Sends this process SIGINT when step `at` is reported."""

    def __init__(self, at: int, total: int) -> None:
        super().__init__(total)
        self.at = at

    def update(self, steps_done: int, **values: float) -> None:
        super().update(steps_done, **values)
        if steps_done == self.at:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_finishes_the_step_and_saves_a_checkpoint(make_checkpoint: Any, cpu: Device, tmp_path: Path) -> None:
    trainer, _, config = trainer_for(make_checkpoint(), cpu, max_steps=9, logging_steps=1, save_steps=4)
    saved: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    with MetricsFile(tmp_path) as metrics:
        message = "interrupted after step 5 of 9, which is saved; go on with --resume"
        with pytest.raises(KeyboardInterrupt, match=message), Interrupts(print) as interrupts, interrupts.steps():
            Run(trainer, BatchStream(documents(), config), metrics, Stopper(5, 9), saved.append, interrupts).train()
    assert saved == [4, 5]
    assert signal.getsignal(signal.SIGINT) is before
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_metrics_have_every_step_also_between_reports(make_checkpoint: Any, cpu: Device, tmp_path: Path) -> None:
    trainer, _, config = trainer_for(make_checkpoint(), cpu, max_steps=8, logging_steps=3, save_steps=0)
    stream = BatchStream(documents(), config)
    with MetricsFile(tmp_path) as metrics:
        progress = TrainingProgress(8, memory=lambda: 4096)
        Run(trainer, stream, metrics, progress, lambda done: None, Interrupts(print)).train()
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(1, 9))
    keys = {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "memory_bytes"}
    assert all(set(r) == keys and r["memory_bytes"] == 4096 for r in records)
    assert [r["tokens"] for r in records] == [stream.get(i).num_tokens for i in range(8)]
    assert all(r["loss"] > 0 and r["grad_norm"] > 0 for r in records)


def test_a_step_that_is_not_finite_is_reported_as_null(make_checkpoint: Any, cpu: Device, tmp_path: Path) -> None:
    trainer, built, config = trainer_for(make_checkpoint(), cpu, max_steps=2, logging_steps=1, save_steps=0)
    cpu.fill(built.parameters.grad, float("inf"))  # as if the first micro-batch had overflowed
    with MetricsFile(tmp_path) as metrics:
        stream = BatchStream(documents(), config)
        Run(trainer, stream, metrics, TrainingProgress(2), lambda done: None, Interrupts(print)).train()
    assert [r["grad_norm"] is None for r in read_metrics(tmp_path / "metrics.jsonl")] == [True, False]
    assert (trainer.optimizer.skipped(), trainer.optimizer.applied()) == (1, 1)


def test_a_trainer_in_a_cycle_gives_its_memory_back_whole(make_checkpoint: Any, device: Device) -> None:
    """Python's collector runs every finalizer of a cycle: blocks must come back to the pool with their buffers."""
    folder = make_checkpoint()
    trainer_for(folder, device)  # what a device keeps for good, such as tables, is made once
    gc.collect()
    before = device.memory().in_use_bytes
    trainer, built, config = trainer_for(folder, device)
    trainer.itself = trainer  # type: ignore[attr-defined]
    trainer.step(BatchStream(documents(), config).get(0), 1e-3)
    del trainer, built
    gc.collect()
    assert device.memory().in_use_bytes == before
    trainer, _, config = trainer_for(folder, device)
    trainer.step(BatchStream(documents(), config).get(0), 1e-3)
    assert trainer.read_history()[0, 0] > 0


def test_a_trainer_is_not_in_a_cycle(make_checkpoint: Any, device: Device) -> None:
    """Its memory comes back when the last reference goes, not when the collector happens to run."""
    folder = make_checkpoint()
    trainer_for(folder, device)
    gc.collect()
    before = device.memory().in_use_bytes
    gc.disable()
    try:
        trainer, built, config = trainer_for(folder, device, gradient_checkpointing=True, lora_dropout=0.1)
        for index in range(3):
            trainer.step(BatchStream(documents(), config).get(index), 1e-3)
        device.synchronize()
        del trainer, built
        assert device.memory().in_use_bytes == before
    finally:
        gc.enable()
