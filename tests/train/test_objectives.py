"""Objectives on preferences: losses in closed form, weighing by pairs, padding, the reference, ranks, resuming."""

from __future__ import annotations

import functools
import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.conftest import SENTENCES, discrete_sibling
from tests.train.thread_world import ThreadWorld, parameters, together
from tests.train.trainers import trainer_for
from wgrad.autograd.ops.optimizer import STATE_SIZE
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.tensor import Tensor, is_recording, no_grad
from wgrad.device.contract import Device
from wgrad.train.commands.cli import main
from wgrad.train.data.packing import Batch, BatchStream, Document, Example, Pair, eval_batches
from wgrad.train.model.adapter_files import WEIGHTS_FILE
from wgrad.train.model.load_config import load_model_config
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.output.metrics import read_steps
from wgrad.train.plan.plan import plan_run
from wgrad.train.step.trainer import Trainer

BETA = 0.3


def examples(objective: str, number: int = 8) -> list[Example]:
    """Answers of unequal length to prompts of unequal length."""
    generator = np.random.default_rng(0)

    def document(length: int, prompt: np.ndarray, label: int = 0) -> Document:
        ids = np.concatenate([prompt, generator.integers(0, 40, length)]).astype(np.int32)
        return Document(ids, np.arange(len(ids)) >= len(prompt), label=label)

    made: list[Example] = []
    for i in range(number):
        prompt = generator.integers(0, 40, 1 + i % 4)
        if objective == "kto":
            made.append(document(3 + (5 * i) % 11, prompt, 1 if i % 3 else -1))
        else:
            made.append(Pair(document(3 + (5 * i) % 11, prompt), document(4 + (3 * i) % 7, prompt)))
    return made


def trainer_of(folder: Path, device: Device, objective: str = "dpo", **options: Any) -> tuple[Trainer, BatchStream]:
    settings = {"objective": objective, "beta": BETA, "max_grad_norm": 0, **options}
    trainer, _, config = trainer_for(folder, device, **settings)
    return trainer, BatchStream(examples(objective), config)


def token_log_probs(trainer: Trainer, batch: Batch) -> np.ndarray:
    """Return log-probabilities of the targets of each row, from the model's logits in float64; 0 without a target."""
    trainer._write(batch)
    with no_grad():
        hidden = trainer.model.hidden(trainer.eval_inputs)
    logits = trainer.device.download(trainer.model.logits(hidden.data)).astype(np.float64)
    logits = logits.reshape(*batch.targets.shape, -1)
    logits -= logits.max(axis=-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    rows, columns = np.indices(batch.targets.shape)
    return np.where(batch.targets >= 0, logits[rows, columns, batch.targets], 0.0)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0, x)


def expected(trainer: Trainer, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return the loss of each pair or example, and the reward of each row, by the papers' formulas."""
    config = trainer.config

    def rewards_of(rows: Batch) -> np.ndarray:
        rows = replace(rows, labels=batch.labels, mismatched=batch.mismatched)
        values = token_log_probs(trainer, rows).sum(axis=1)
        with trainer.model.without_adapter():
            return config.beta * (values - token_log_probs(trainer, rows).sum(axis=1))

    labels = batch.labels
    assert labels is not None
    if config.objective == "orpo":
        return odds_ratio(trainer, batch)
    if config.objective == "simpo":
        return simple_preference(trainer, batch)
    rewards = rewards_of(batch)
    if config.objective == "kto":
        assert batch.mismatched is not None
        there = labels != 0
        offset = max(rewards_of(batch.mismatched)[there].mean(), 0.0)
        weights = np.where(labels > 0, config.desirable_weight, config.undesirable_weight)
        return (weights * there / (1 + np.exp(labels * (rewards - offset)))), rewards
    z = rewards[: config.batch_size] - rewards[config.batch_size :]
    smoothing = config.label_smoothing
    losses = ((1 - smoothing) * softplus(-z) - smoothing * softplus(z)) / (1 - 2 * smoothing)
    return losses * (labels[: config.batch_size] > 0), rewards


def mean_log_probs(trainer: Trainer, batch: Batch) -> np.ndarray:
    lengths = np.maximum((batch.targets >= 0).sum(axis=1), 1)
    return token_log_probs(trainer, batch).sum(axis=1) / lengths


def simple_preference(trainer: Trainer, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    rewards = trainer.config.beta * mean_log_probs(trainer, batch)
    z = rewards[: trainer.config.batch_size] - rewards[trainer.config.batch_size :] - trainer.config.simpo_gamma
    there = np.any(batch.targets >= 0, axis=1)[: trainer.config.batch_size]
    return softplus(-z) * there, rewards


def odds_ratio(trainer: Trainer, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return ORPO's loss without the cross-entropy of the chosen texts, which `check` adds."""
    mean = mean_log_probs(trainer, batch)
    log_odds = (mean - np.log1p(-np.exp(np.minimum(mean, -1e-9)))).reshape(2, -1)
    there = np.any(batch.targets >= 0, axis=1)[: trainer.config.batch_size]
    return trainer.config.beta * softplus(log_odds[1] - log_odds[0]) * there, trainer.config.beta * mean


def of_chosen_texts(trainer: Trainer, batches: list[Batch]) -> float:
    """The mean cross-entropy of all their tokens, prompts included."""
    total, count = 0.0, 0
    for batch in batches:
        everything = np.full_like(batch.targets, -100)
        for row in range(trainer.config.batch_size):
            length = int(batch.positions[row].max()) + 1
            everything[row, : length - 1] = batch.ids[row, 1:length]
        found = token_log_probs(trainer, replace(batch, targets=everything))
        total, count = total - found.sum(), count + int((everything >= 0).sum())
    return total / count


def trained(trainer: Trainer, stream: BatchStream, steps: int = 3) -> None:
    """So that it differs from its reference."""
    for index in range(steps):
        trainer.step(stream.get(index), 1e-2)
    trainer.read_history()


FORMULAS: list[dict[str, Any]] = [
    {"objective": "dpo", "label_smoothing": 0.2},
    {"objective": "orpo"},
    {"objective": "simpo", "beta": 2.0, "simpo_gamma": 0.7},
    {"objective": "kto", "desirable_weight": 1.5, "undesirable_weight": 0.7, "batch_size": 3},
]


@pytest.mark.parametrize("options", FORMULAS)
def test_losses_are_those_of_the_formulas(options: dict, make_checkpoint: Any, device: Device) -> None:
    """Compare a replayed step and the held-out loss, whose last batch is not full."""
    trainer, stream = trainer_of(make_checkpoint(), device, **options)
    trained(trainer, stream)
    step = stream.get(3)
    trainer.step(step, 0.0)
    (row,) = trainer.read_history()
    check(trainer, step.batches, float(row[0]), trainer.metrics(row))
    batches = eval_batches(examples(options["objective"], 5), trainer.config)
    assert batches[-1].num_targets < trainer.config.batch_size
    check(trainer, batches, *trainer.measure(batches))


def check(trainer: Trainer, batches: list[Batch], loss: float, metrics: dict[str, float]) -> None:
    wanted = [expected(trainer, batch) for batch in batches]
    losses, rewards = (np.concatenate(parts) for parts in zip(*wanted))
    labels = np.concatenate([batch.labels for batch in batches if batch.labels is not None])
    mean = losses.sum() / sum(batch.num_targets for batch in batches)
    if trainer.config.objective == "orpo":
        mean += of_chosen_texts(trainer, batches)
    assert loss == pytest.approx(mean, rel=1e-4)
    chosen, rejected = rewards[labels > 0], rewards[labels < 0]
    assert metrics["rewards/chosen"] == pytest.approx(chosen.mean(), rel=1e-3, abs=1e-4)
    assert metrics["rewards/rejected"] == pytest.approx(rejected.mean(), rel=1e-3, abs=1e-4)
    assert metrics["rewards/margins"] == pytest.approx(chosen.mean() - rejected.mean(), rel=1e-3, abs=2e-4)
    assert abs(metrics["rewards/margins"]) > 0.02
    if trainer.config.objective == "kto":
        assert metrics["kl"] >= 0
    else:
        assert 0 < metrics["rewards/accuracies"] == pytest.approx((chosen > rejected).mean())


def test_odds_of_likely_answers(make_checkpoint: Any, cpu: Device) -> None:
    """Where log-odds are far from log-probabilities, as they are not with a model that knows nothing."""
    trainer, stream = trainer_of(make_checkpoint(), cpu, "orpo")
    (batch, *_) = stream.get(0).batches
    trainer.objective.begin([batch])
    trainer._write(batch)
    losses = np.random.default_rng(1).uniform(0.05, 0.6, batch.targets.shape).astype(np.float32)
    trainer.model.token_losses = lambda inputs: Tensor(cpu.upload(losses.reshape(-1)), cpu)  # type: ignore[method-assign]
    answers = batch.targets >= 0
    p = np.exp(-np.sum(losses * answers, axis=1, dtype=np.float64) / answers.sum(axis=1)).reshape(2, -1)
    ratio = p[0] / (1 - p[0]) * (1 - p[1]) / p[1]
    texts = (batch.positions[:2, 1:] > 0) * losses[:2, :-1]
    wanted = 2 * texts.sum() / np.count_nonzero(texts) + BETA * np.log1p(1 / ratio).sum()
    assert trainer.objective.loss(trainer.inputs).numpy()[0] == pytest.approx(wanted, rel=1e-5)


def closed_form(config: RunOptions, batch: Batch, losses: np.ndarray, reference: np.ndarray) -> float:
    """The sum over a micro-batch, from the losses of its tokens [rows, tokens] in float64."""
    assert batch.labels is not None
    answers, size = batch.targets >= 0, config.batch_size
    there = batch.labels[:size] != 0
    log_probs, kept = -(losses * answers).sum(axis=1), -(reference * answers).sum(axis=1)
    if config.objective == "kto":
        weights = np.where(batch.labels > 0, config.desirable_weight, config.undesirable_weight) * there
        return float((weights / (1 + np.exp(batch.labels * config.beta * (log_probs - kept)))).sum())
    mean = log_probs / np.maximum(answers.sum(axis=1), 1)
    if config.objective == "simpo":
        z = config.beta * (mean[:size] - mean[size:]) - config.simpo_gamma
        return float((softplus(-z) * there).sum())
    if config.objective == "orpo":
        odds = (mean - np.log1p(-np.exp(np.minimum(mean, -1e-9)))).reshape(2, -1)
        texts = batch.positions[:size, 1:] > 0
        of_texts = (losses[:size, :-1] * texts).sum() / texts.sum() * there.sum()
        return float(of_texts + config.beta * (softplus(odds[1] - odds[0]) * there).sum())
    z = config.beta * np.subtract(*(log_probs - kept).reshape(2, -1))
    smoothing = config.label_smoothing
    robust = ((1 - smoothing) * softplus(-z) - smoothing * softplus(z)) / (1 - 2 * smoothing)
    return float((robust * there).sum())


@pytest.mark.parametrize("options", FORMULAS)
def test_gradients_are_central_differences(options: dict, make_checkpoint: Any, cpu: Device) -> None:
    """Those of the losses of tokens, in float64, of a micro-batch that is not full."""
    trainer, _ = trainer_of(make_checkpoint(), cpu, **options)
    batch = eval_batches(examples(options["objective"], 5), trainer.config)[-1]
    trainer.objective.begin([batch])
    trainer._write(batch)
    generator, shape = np.random.default_rng(1), batch.targets.shape
    counted = trainer.objective.targets(batch) >= 0
    losses, reference = (counted * generator.uniform(0.05, 0.6, shape) for _ in range(2))
    leaf = Tensor(cpu.upload(losses.astype(np.float32).reshape(-1)), cpu, requires_grad=True)
    constant = Tensor(cpu.upload(reference.astype(np.float32).reshape(-1)), cpu)
    fake: Any = lambda inputs: leaf if is_recording() else constant  # noqa: E731
    trainer.model.token_losses = fake  # type: ignore[method-assign]
    loss = trainer.objective.loss(trainer.inputs)
    loss.backward()
    assert leaf.gradient is not None
    found, step = cpu.download(leaf.gradient).reshape(shape), 1e-6
    assert loss.numpy()[0] == pytest.approx(closed_form(trainer.config, batch, losses, reference), rel=1e-5)
    wanted = np.zeros(shape)
    for place in zip(*np.nonzero(counted)):
        for sign in (1, -1):
            moved = losses.copy()
            moved[place] += sign * step
            wanted[place] += sign * closed_form(trainer.config, batch, moved, reference) / (2 * step)
    assert np.count_nonzero(wanted) >= np.count_nonzero(batch.targets >= 0)
    np.testing.assert_allclose(found[counted], wanted[counted], rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("objective", ["dpo", "orpo", "simpo"])
def test_a_step_is_the_same_however_it_is_split_and_padded(objective: str, make_checkpoint: Any, cpu: Device) -> None:
    folder, results = make_checkpoint(), []
    for size, accumulate, length in ((8, 1, 21), (2, 4, 21), (3, 3, 21), (4, 2, 37)):
        options = {"batch_size": size, "gradient_accumulation_steps": accumulate, "max_length": length}
        trainer, stream = trainer_of(folder, cpu, objective, **options)
        for _ in range(2):  # lora_A has no gradient in the first
            trainer.step(stream.get(0), 1e-2)
        history = trainer.read_history()
        results.append((history[:, 0], cpu.download(trainer.optimizer.exp_avg), trainer.metrics(history[1])))
    loss, gradient, metrics = results[0]
    assert (
        (loss[0] == pytest.approx(np.log(2))) == (objective == "dpo")
        and loss[1] != loss[0]
        and np.linalg.norm(gradient) > 1e-3
    )
    for other_loss, other, others in results[1:]:
        np.testing.assert_allclose(other_loss, loss, rtol=1e-5)
        assert np.linalg.norm(other - gradient) <= 1e-5 * np.linalg.norm(gradient)
        assert others == pytest.approx(metrics, rel=1e-4, abs=1e-5)


def test_dropout_leaves_the_reference_alone(make_checkpoint: Any, cpu: Device) -> None:
    """The reference always gives the base model's values, step after step."""
    trainer, stream = trainer_of(make_checkpoint(), cpu, lora_dropout=0.5, gradient_accumulation_steps=1, batch_size=8)
    for _ in range(4):
        trainer.step(stream.get(0), 1e-2)
    scores = trainer.read_history()[:, 1 + STATE_SIZE :].reshape(4, 3, -1)
    np.testing.assert_array_equal(scores[1:, 2], np.broadcast_to(scores[0, 2], scores[1:, 2].shape))
    assert (scores[1, 1] != scores[2, 1]).any() and np.abs(scores[3, 1] - scores[0, 2]).max() > 0.1


def test_ranks_tell_the_metrics_of_the_whole_step(make_checkpoint: Any) -> None:
    folder, held, barrier = make_checkpoint(), [None, None], threading.Barrier(2)
    one, stream = trainer_of(folder, ReferenceDevice(), gradient_accumulation_steps=4)
    ranks = []
    for rank in range(2):
        alone, _ = trainer_of(folder, ReferenceDevice(), gradient_accumulation_steps=4)
        ranks.append(Trainer(alone.model, alone.optimizer, one.config, ThreadWorld(rank, held, barrier)))
    for index in range(2):
        together(ranks, functools.partial(Trainer.step, step=stream.get(index), lr=1e-2))
        one.step(stream.get(index), 1e-2)
    np.testing.assert_array_equal(parameters(ranks[0]), parameters(ranks[1]))
    history = one.read_history()
    for trainer in ranks:
        found = trainer.read_history()
        np.testing.assert_allclose(found, history, rtol=1e-4, atol=1e-4)
        assert trainer.metrics(found[1]) == pytest.approx(one.metrics(history[1]), rel=1e-3, abs=1e-3)
    measured: dict[int, Any] = {}
    batches = eval_batches(examples("dpo"), one.config)
    together(ranks, lambda trainer: measured.update({trainer.world.rank: trainer.measure(batches)}))
    for loss, metrics in measured.values():
        assert loss == pytest.approx(one.measure(batches)[0], rel=1e-4)
        assert metrics == pytest.approx(one.measure(batches)[1], rel=1e-3, abs=1e-3)


@pytest.fixture
def data(write_lines: Any) -> str:
    shifted = (SENTENCES[i:] + SENTENCES[:i] for i in (1, 3))
    return write_lines(*({"prompt": a, "chosen": f" {b}", "rejected": f" {c}"} for a, b, c in zip(SENTENCES, *shifted)))


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_run_resumes_to_the_same_bits(
    objective: str, make_checkpoint: Any, data: str, tmp_path: Path, capsys: Any
) -> None:
    options = {"--model": make_checkpoint(), "--data": data, "--device": "cpu", "--lora-r": 3, "--max-length": 64}
    options |= {
        "--objective": objective,
        "--batch-size": 2,
        "--gradient-accumulation-steps": 2,
        "--save-steps": 2,
        "--learning-rate": 5e-3,
    }
    command = ["finetune", *(str(word) for pair in options.items() for word in pair), "--eval-fraction", "0.25"]
    command += ["--no-sample", "--logging-steps", "1"]
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert main([*command, "--out", str(whole), "--max-steps", "5"]) == 0
    said = capsys.readouterr().out
    assert "has preference pairs" in said and "reference: the base model without an adapter" in said
    begin = {"dpo": "0.6931 (rewards/accuracies 0.0000, ", "kto": "0.5000 ("}[objective]
    assert f"held-out loss before: {begin}rewards/margins 0.0000)" in said
    first = read_steps(whole / "metrics.jsonl")
    assert all("rewards/chosen" in record and "rewards/margins" in record for record in first)
    shutil.copytree(whole, again)
    for path in (again / WEIGHTS_FILE, again / "results.json", again / "checkpoints" / "step-5"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert main([*command, "--out", str(again), "--max-steps", "5", "--resume"]) == 0
    assert (again / WEIGHTS_FILE).read_bytes() == (whole / WEIGHTS_FILE).read_bytes()
    of_machine = ("tokens_per_second", "memory_bytes")
    for one, other in zip(first, read_steps(again / "metrics.jsonl"), strict=True):
        one, other = ({k: v for k, v in r.items() if k not in of_machine} for r in (one, other))
        assert one == other
    results = [json.loads((out / "results.json").read_text()) for out in (whole, again)]
    assert results[0]["held_out_rewards/margins_after"] == results[1]["held_out_rewards/margins_after"] != 0
    assert main([*command, "--out", str(again), "--max-steps", "6", "--resume", "--beta", "0.2"]) == 2
    assert "--beta: the run in" in capsys.readouterr().err


def test_weights_and_checkpoints_in_main_memory_change_no_bit(make_checkpoint: Any, wgpu_device: Device) -> None:
    """KTO has the most forwards in one recording; and the plan predicts the memory of all of it."""
    folder, found = make_checkpoint(), []
    options: dict[str, Any] = {
        "objective": "kto",
        "max_length": 40,
        "batch_size": 3,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
    }
    options |= {"sample": False, "logging_steps": 8, "lora_r": 3}
    moved = {"stream_weights": "on", "offload_activations": True}
    for more in ({"stream_weights": "off"}, moved):
        device = discrete_sibling()
        config = RunOptions(**options, **more)
        plan = plan_run(config, load_model_config(folder), folder, device, 3)
        kept = device.memory().in_use_bytes
        device.reset_peak()
        trainer, stream = trainer_of(folder, device, **options, **more)
        trained(trainer, stream)
        batches = eval_batches(examples("kto", 5), trainer.config)
        found.append((trainer.measure(batches), parameters(trainer)))
        assert plan is not None and plan.peak_bytes == pytest.approx(device.memory().peak_bytes - kept, rel=0.05)
    assert found[0][0] == found[1][0]
    np.testing.assert_array_equal(found[0][1], found[1][1])
