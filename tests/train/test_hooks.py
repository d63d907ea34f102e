"""A caller's own loss, metrics and learning rate in a run of `wgrad.finetune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wgrad
from tests.train.conftest import SENTENCES, random_weights, tiny_config, write_checkpoint
from wgrad import functional as F
from wgrad.device.errors import WgradError
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.step.hooks import Hooks

pytestmark = pytest.mark.usefixtures("short_samples")

RECORDS = [{"prompt": text[:9], "completion": text[9:]} for text in SENTENCES] * 3
OPTIONS: dict[str, Any] = {
    "data": RECORDS, "device": "cpu", "max_steps": 3, "max_length": 32, "lora_r": 2, "batch_size": 2,
    "gradient_accumulation_steps": 2, "sample": False, "learning_rate": 5e-3, "compute": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = tiny_config(num_hidden_layers=1)
    return str(write_checkpoint(tmp_path_factory.mktemp("hooks") / "model", config, random_weights(config)))


def cross_entropy(output: wgrad.ModelOutput, batch: wgrad.TokenBatch) -> wgrad.Tensor:
    assert output.hidden.shape[0] == batch.rows * batch.tokens
    return F.sum(output.token_losses())


def by_logits(output: wgrad.ModelOutput, batch: wgrad.TokenBatch) -> wgrad.Tensor:
    """The same, of logits: each row times the identity."""
    logits = output.logits()
    width = logits.shape[1]
    return F.linear_cross_entropy(logits, batch.device.upload(np.eye(width, dtype=np.float32)), batch.targets)


def run(model: str, out: Path, **options: Any) -> tuple[wgrad.FinetuneResult, list[float]]:
    result = wgrad.finetune(model=model, out=out, **OPTIONS | options)
    return result, [r.loss for r in result.metrics()]


@pytest.mark.parametrize("loss", [cross_entropy, by_logits])
def test_the_cross_entropy_of_ones_own_is_ours(loss: Any, model: str, tmp_path: Path) -> None:
    usual, losses = run(model, tmp_path / "usual")
    own, found = run(model, tmp_path / "own", loss=loss)
    assert np.allclose(losses, found, rtol=1e-5)
    assert own.held_out_loss_after == pytest.approx(usual.held_out_loss_after, rel=1e-5)


def test_another_loss_trains_something_else(model: str, tmp_path: Path) -> None:
    def twice(output: wgrad.ModelOutput, batch: wgrad.TokenBatch) -> wgrad.Tensor:
        return F.scale(F.sum(output.token_losses()), 2.0)

    (usual, losses), (other, found) = run(model, tmp_path / "usual"), run(model, tmp_path / "own", loss=twice)
    assert found[0] == pytest.approx(2 * losses[0], rel=1e-5)
    assert other.held_out_loss_before == pytest.approx(2 * (usual.held_out_loss_before or 0), rel=1e-5)


def test_a_run_goes_on_with_its_own_loss_alone(model: str, tmp_path: Path) -> None:
    run(model, tmp_path / "out", loss=cross_entropy)
    more = OPTIONS | {"model": model, "out": tmp_path / "out", "max_steps": 4, "resume": True}
    with pytest.raises(WgradError, match="--resume: loss was 'a function' when .* give the same options"):
        wgrad.finetune(**more)
    assert wgrad.finetune(loss=cross_entropy, **more).steps == 4
    run(model, tmp_path / "usual")
    with pytest.raises(WgradError, match="--resume: loss was "):
        wgrad.finetune(**more | {"out": tmp_path / "usual", "loss": cross_entropy})


def test_the_whole_model_trains_by_its_logits(model: str, tmp_path: Path) -> None:
    """The output layer is trained too, of which token_losses has no gradient."""
    more: dict[str, Any] = {"full": True, "learning_rate": 1e-3}
    options = {name: value for name, value in OPTIONS.items() if name != "lora_r"} | more
    found = [
        [r.loss for r in wgrad.finetune(model=model, out=tmp_path / str(n), loss=loss, **options).metrics()]
        for n, loss in enumerate((None, by_logits))
    ]
    assert np.allclose(found[0], found[1], rtol=1e-4)
    with pytest.raises(WgradError, match="no gradient of the output layer, which is trained: use logits"):
        wgrad.finetune(model=model, out=tmp_path / "x", loss=cross_entropy, **options)


def test_metrics_of_what_is_held_out(model: str, tmp_path: Path, capsys: Any) -> None:
    """A negative log-likelihood is the loss; a mean and one number for each target are the same."""
    seen = []

    def nll(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
        seen.append(len(targets))
        top = logits.max(axis=1, keepdims=True)
        return np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0] - logits[np.arange(len(targets)), targets]

    metrics = {"nll": nll, "mean": lambda a, b: float(nll(a, b).mean()), "right": lambda a, b: a.argmax(axis=1) == b}
    result, _ = run(model, tmp_path / "out", metrics=metrics, eval_steps=2, progress=True, eval_fraction=0.3)
    saved = json.loads((tmp_path / "out" / "results.json").read_text())
    for when in ("before", "after"):
        assert saved[f"held_out_nll_{when}"] == pytest.approx(saved[f"held_out_loss_{when}"], rel=1e-4)
        assert saved[f"held_out_mean_{when}"] == pytest.approx(saved[f"held_out_nll_{when}"], rel=1e-6)
        assert 0 <= saved[f"held_out_right_{when}"] <= 1
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "held_out_nll" in line] == [0, 2, 3]
    assert "nll " in capsys.readouterr().out and max(seen) <= 256


def test_a_callback_chooses_the_learning_rate(model: str, tmp_path: Path) -> None:
    class Halve(wgrad.Callback):
        def on_learning_rate(self, report: wgrad.RateReport) -> float | None:
            return None if report.step == 1 else report.lr / 2

    class Zero(wgrad.Callback):
        def on_learning_rate(self, report: wgrad.RateReport) -> float | None:
            return 0 if report.step == report.total_steps else None

    usual, _ = run(model, tmp_path / "usual")
    other, _ = run(model, tmp_path / "other", callbacks=[Halve(), Zero()])
    rates = [r.lr for r in usual.metrics()]
    assert [r.lr for r in other.metrics()] == [rates[0], rates[1] / 2, 0.0]
    # A step at rate 0 changes nothing.
    assert [r.lr for r in run(model, tmp_path / "one", callbacks=[Zero()], max_steps=1)[0].metrics()] == [0.0]


@pytest.mark.parametrize("value", [-1.0, float("nan"), "fast", True, float("inf"), 10**400, [1.0]])
def test_a_callbacks_rate_must_be_a_number(value: Any, model: str, tmp_path: Path) -> None:
    class Wrong(wgrad.Callback):
        def on_learning_rate(self, report: wgrad.RateReport) -> float | None:
            return value

    with pytest.raises(WgradError, match="Wrong.on_learning_rate: must return a number, 0 or more, or None; got"):
        wgrad.finetune(model=model, out=tmp_path / "out", callbacks=[Wrong()], **OPTIONS)


async def later(output: Any, batch: Any) -> Any: ...


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": 3}, "loss: must be a plain function; got 3"),
        ({"loss": later}, "loss: must be a plain function"),
        ({"loss": lambda output: output}, "loss: must take two arguments, the model's output and the batch"),
        ({"loss": lambda output, batch: 1.0}, "loss: must return a Tensor of one number; got float"),
        ({"loss": lambda output, batch: output.token_losses()}, "loss: must return one float32 number, the sum"),
        (
            {"loss": lambda output, batch: output.token_losses().sum() * output.hidden.mean().item()},
            "loss: reads values (item, numpy), which stay the same when the run replays its work; compute with Tensors",
        ),
        ({"loss": lambda output, batch: output.token_losses().detach().sum()}, "loss: depends on nothing that is tr"),
        ({"metrics": {"x": lambda a, b: 0}, "eval_fraction": 0}, "metrics: are of held-out data, and there is none"),
        ({"loss": cross_entropy, "objective": "dpo"}, "loss: is for objective='sft'; got 'dpo'"),
        ({"metrics": [len]}, "metrics: must be a dict of names and functions; got list"),
        ({"metrics": {"loss": len}}, "metrics: a name must be a word other than 'loss'"),
        ({"metrics": {"a b": len}}, "metrics: a name must be a word"),
        ({"metrics": {"x": lambda logits: 0}}, "metrics: x: must take two arguments, logits and targets"),
        ({"metrics": {"x": lambda a, b: "good"}}, "metrics: x must return a number or"),
        ({"metrics": {"x": lambda a, b: np.zeros(len(b) + 1)}}, "metrics: x must return a number or"),
        ({"metric": {"x": len}}, "finetune: unknown argument 'metric' (did you mean metrics?)"),
        ({"optimizers": (None, None)}, "finetune: unknown argument 'optimizers'"),
    ],
)
def test_mistakes_are_refused(options: dict[str, Any], message: str, model: str, tmp_path: Path) -> None:
    with pytest.raises(WgradError) as error:
        wgrad.finetune(model=model, out=tmp_path / "out", **OPTIONS | options)
    assert message in str(error.value)


def test_metrics_need_held_out_data_of_either_kind() -> None:
    hooks = Hooks(metrics={"x": lambda a, b: 0})
    for given in ({"eval_fraction": 0.5}, {"eval_fraction": 0.0, "eval_data": ("held.txt",)}):
        hooks.check(RunOptions(**given))
    with pytest.raises(WgradError, match="metrics: are of held-out data, and there is none"):
        hooks.check(RunOptions(eval_fraction=0.0))
