"""A finished run: left alone, extended, or told what would be ignored; and what is no result is not written as one."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.conftest import scale_last_norm
from tests.train.nf4_writer import save_nf4_checkpoint
from wgrad.device.files import write_json
from wgrad.train.commands.cli import main
from wgrad.train.model.adapter_files import WEIGHTS_FILE
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.load_weights import load_frozen
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.output.metrics import read_steps
from wgrad.train.run.loop import MANY_SKIPPED
from wgrad.train.run.schedule import learning_rate, warmup_steps

pytestmark = pytest.mark.usefixtures("short_samples")

SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_hidden_layers": 1}
SMALL = {"hidden_size": 16, "intermediate_size": 24, **SIZES}


class Runner:
    """Runs commands on one tiny model; `said` and `error` are what the last one printed."""

    def __init__(self, model: Path, data: Path, capsys: Any) -> None:
        self.model, self.data, self.capsys = model, data, capsys
        self.said = self.error = ""

    def __call__(self, out: Path, *more: str, rank: bool = True) -> int:
        text = f"finetune --model {self.model} --data {self.data} --out {out} --device cpu --max-length 24"
        text += (
            " --logging-steps 1 --gradient-accumulation-steps 1 --save-steps 2 --learning-rate 5e-3"
            + " --lora-r 2" * rank
        )
        words = [word for word in text.split() if word != "--learning-rate" or "--learning-rate" not in more]
        if "--learning-rate" in more:
            words.remove("5e-3")
        status = main([*words, *more])
        self.said, self.error = self.capsys.readouterr()
        return status


@pytest.fixture
def run(make_checkpoint: Any, text_data: Path, capsys: Any) -> Runner:
    return Runner(make_checkpoint(**SMALL), text_data, capsys)


def bytes_of(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}


# ---- extended ----------------------------------------------------------------------------------
def test_an_extended_run_is_the_longer_run(run: Runner, tmp_path: Path) -> None:
    """With a rate that does not depend on the length, bit for bit."""
    flat = ("--lr-scheduler-type", "constant", "--warmup-steps", "0", "--lora-dropout", "0.1")
    assert run(tmp_path / "long", "--max-steps", "9", *flat) == 0
    out = tmp_path / "out"
    assert run(out, "--max-steps", "4", *flat) == 0
    first = (out / WEIGHTS_FILE).read_bytes()
    assert run(out, "--max-steps", "9", "--resume") == 0
    assert "schedule: 9 steps in all, extended from 4 (was 4); constant from a peak of 0.005; step 5" in run.said
    assert (out / WEIGHTS_FILE).read_bytes() == (tmp_path / "long" / WEIGHTS_FILE).read_bytes() != first
    results = [json.loads((o / "results.json").read_text()) for o in (out, tmp_path / "long")]
    for key in ("steps", "max_steps", "held_out_loss_before", "held_out_loss_after", "sample_after"):
        assert results[0][key] == results[1][key], key
    assert [r["step"] for r in read_steps(out / "metrics.jsonl")] == list(range(1, 10))


def test_the_new_schedule_is_said(run: Runner, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(out, "--max-steps", "4") == 0
    assert run(out, "--max-steps", "8", "--resume") == 0
    rate = learning_rate(RunOptions(learning_rate=5e-3), 4, 8)
    assert f"step 5 has learning rate {rate:.2e}" in run.said
    assert read_steps(out / "metrics.jsonl")[4]["lr"] == rate


def test_more_epochs_extend_a_finished_run(run: Runner, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(out, "--gradient-accumulation-steps", "8") == 0
    steps = json.loads((out / "results.json").read_text())["steps"]
    assert run(out, "--gradient-accumulation-steps", "8", "--epochs", "2", "--resume") == 0
    assert json.loads((out / "results.json").read_text())["steps"] == 2 * steps
    assert run(out, "--gradient-accumulation-steps", "8", "--resume") == 0 and "this run is finished" in run.said
    assert run(out, "--gradient-accumulation-steps", "8", "--epochs", "1", "--resume") == 2
    assert "--epochs: the run in" in run.error and "already has 2" in run.error


def test_an_extended_run_that_was_killed_goes_on_without_being_told_again(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wgrad.train.step.trainer import Trainer

    out, step = tmp_path / "out", Trainer.step
    assert run(out, "--max-steps", "4") == 0

    def killed(self: Any, item: Any, lr: float) -> None:
        if item.index == 5:
            raise RuntimeError("power cut")
        step(self, item, lr)

    monkeypatch.setattr(Trainer, "step", killed)
    with pytest.raises(RuntimeError):
        run(out, "--max-steps", "9", "--resume")
    monkeypatch.undo()
    assert (out / WEIGHTS_FILE).exists()  # of the run's first end, until there is a better one
    assert run(out, "--resume") == 0 and "training: " in run.said
    assert json.loads((out / "results.json").read_text())["steps"] == 9


# ---- ignored -----------------------------------------------------------------------------------
def test_an_option_that_a_finished_run_would_ignore_is_refused(run: Runner, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(out, "--max-steps", "4") == 0
    before = bytes_of(out)
    for option, value, message in (
        ("--learning-rate", "1e-3", "would be ignored, because the run in"),
        ("--lr-scheduler-type", "linear", "would be ignored, because the run in"),
        ("--warmup-steps", "2", "would be ignored"),
        ("--sample-prompt", "x", "would be ignored"),
        ("--weight-decay", "0.1", "would be ignored"),
        ("--epochs", "7", "would be ignored, because --max-steps 4 decides the length"),
        ("--max-steps", "3", "the run in .* already has 4 steps, more than the 3 asked for"),
        ("--adapter", "x", "the run in .* was begun with None, which --resume cannot change"),
        ("--eval-data", "x.jsonl", "would be ignored"),
        ("--lora-r", "4", "the run in .* was begun with 2"),
    ):
        assert run(out, "--resume", option, value, rank=option not in ("--lora-r", "--adapter")) == 2, option
        assert re.search(f"{option}: {message}", run.error), run.error
        assert run.error.count("\n") == 1 and bytes_of(out) == before
    # Where and how it runs is no matter now.
    assert run(out, "--max-steps", "4", "--resume", "--logging-steps", "3") == 0
    assert "this run is finished: nothing to resume; more --max-steps or --epochs extend it" in run.said


@pytest.mark.parametrize(
    ("words", "option", "reason"),
    [
        (["--adapter", "A", "--lora-r", "2"], "--lora-r", "--adapter brings its own"),
        (["--adapter", "A", "--lora-alpha", "2"], "--lora-alpha", "--adapter brings its own"),
        (["--adapter", "A", "--use-rslora"], "--use-rslora", "--adapter brings its own"),
        (["--adapter", "A", "--target-modules", "q_proj"], "--target-modules", "--adapter brings its own"),
        (["--full", "--lora-r", "2"], "--lora-r", "--full trains all parameters"),
        (["--full", "--no-double-quant"], "--double-quant", "--full quantizes nothing"),
        (["--full", "--block-size", "128"], "--block-size", "--full quantizes nothing"),
        (["--eval-data", "E", "--eval-fraction", "0.2"], "--eval-fraction", "--eval-data is what is held out"),
    ],
)
def test_an_option_without_effect_beside_another_is_refused(
    words: list[str], option: str, reason: str, run: Runner, tmp_path: Path
) -> None:
    assert run(tmp_path / "out", *words, rank=False) == 2
    assert run.error.startswith(f"wgrad: error: {option}: would be ignored: {reason}")
    assert not (tmp_path / "out").exists()


def test_a_quantization_that_is_done_takes_no_options(run: Runner, cpu: Any, tmp_path: Path) -> None:
    weights = load_frozen(run.model, load_model_config(run.model), cpu)
    quantized = tmp_path / "quantized"
    save_nf4_checkpoint(quantized, json.loads((run.model / "config.json").read_text()), weights, cpu)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(run.model / name, quantized)
    for words in (["--block-size", "128"], ["--no-double-quant"]):
        assert run(tmp_path / "out", "--model", str(quantized), "--max-steps", "2", *words) == 2
        option = words[0].replace("no-", "")
        assert f"{option}: would be ignored: {quantized} is quantized already: leave it out" in run.error
    assert run(tmp_path / "out", "--model", str(quantized), "--max-steps", "2") == 0


def test_config_yaml_of_a_run_holds_what_had_an_effect(run: Runner, tmp_path: Path) -> None:
    """So that it can be given to --config as it is."""
    assert run(tmp_path / "first", "--max-steps", "2") == 0
    second = tmp_path / "second"
    assert run(second, "--max-steps", "2", "--adapter", str(tmp_path / "first"), rank=False) == 0
    text = (second / "config.yaml").read_text()
    assert " rank:" not in text and "format: 1" in text
    third = tmp_path / "third"
    assert main(["finetune", "--config", str(second / "config.yaml"), "--out", str(third)]) == 0
    assert (third / WEIGHTS_FILE).read_bytes() == (second / WEIGHTS_FILE).read_bytes()
    assert run(second, "--resume", "--max-steps", "4", "--adapter", str(third), rank=False) == 2
    assert "--adapter: the run in" in run.error


def test_a_resumed_run_does_not_need_the_adapter_that_it_began_with(run: Runner, tmp_path: Path) -> None:
    """Rank and scale are the checkpoint's: the folder may be gone, or hold another adapter by now."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert run(first, "--max-steps", "2") == 0
    assert run(second, "--max-steps", "2", "--adapter", str(first), rank=False) == 0
    write_json(first / "adapter_config.json", json.loads((first / "adapter_config.json").read_text()) | {"r": 5})
    assert run(second, "--max-steps", "4", "--resume", rank=False) == 0
    assert json.loads((second / "adapter_config.json").read_text())["r"] == 2


# ---- other weights -----------------------------------------------------------------------------
def test_a_base_of_the_same_layout_with_other_weights_cannot_resume(
    run: Runner, make_checkpoint: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run(out, "--max-steps", "4") == 0
    other = make_checkpoint(name="other", seed=1, **SMALL)
    assert run(out, "--resume", "--max-steps", "6", "--model", str(other)) == 2
    assert "--resume: the base model is not what it was when" in run.error
    moved = make_checkpoint(name="moved", **SMALL)  # the same one in another place
    assert run(out, "--resume", "--max-steps", "6", "--model", str(moved)) == 0


def test_other_held_out_data_cannot_resume(run: Runner, tmp_path: Path) -> None:
    held_out = tmp_path / "held.jsonl"
    held_out.write_text('{"text": "the early bird catches the worm"}\n')
    out = tmp_path / "out"
    assert run(out, "--max-steps", "4", "--eval-data", str(held_out)) == 0
    held_out.write_text('{"text": "the late bird catches the second worm"}\n')
    assert run(out, "--resume", "--max-steps", "6") == 2
    assert "--resume: the held-out data is not what it was when" in run.error


# ---- no result ---------------------------------------------------------------------------------
def nothing_like_a_result(out: Path) -> None:
    names = {p.name for p in out.iterdir()}
    assert names <= {".lock", "config.yaml", "metrics.jsonl", "samples.jsonl", "checkpoints"}
    for state in out.glob("checkpoints/step-*/adapter_model.safetensors"):
        from safetensors.numpy import load_file

        assert all(np.isfinite(value).all() for value in load_file(state).values())


@pytest.mark.parametrize("steps", ["1", "2", "40"])
@pytest.mark.parametrize("save_every", ["0", "2"])
def test_what_is_not_finite_is_not_saved(steps: str, save_every: str, run: Runner, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(out, "--learning-rate", "1e300", "--max-steps", steps, "--save-steps", save_every) == 1
    assert run.error.count("\n") == 1 and "is not finite: it is neither saved nor written as a result" in run.error
    assert "lower --learning-rate than 1e+300" in run.error
    nothing_like_a_result(out)
    assert len(read_steps(out / "metrics.jsonl")) <= MANY_SKIPPED + 1  # it does not go on for days


def test_a_full_model_that_is_not_finite_ends_the_run(run: Runner, tmp_path: Path) -> None:
    assert run(tmp_path / "out", "--full", "--learning-rate", "1e300", "--max-steps", "3", rank=False) == 1
    nothing_like_a_result(tmp_path / "out")


@pytest.mark.parametrize("compute", ["float16", "float32"])
def test_a_run_whose_every_step_is_skipped_fails(
    compute: str, make_checkpoint: Any, run: Runner, tmp_path: Path
) -> None:
    """An activation beyond float16 (or float32): no gradient is ever finite."""
    scale_last_norm(run.model, 1e5 if compute == "float16" else 1e38)
    out, steps = tmp_path / "out", str(MANY_SKIPPED + 3)
    assert run(out, "--max-steps", steps, "--compute", compute) == 1
    assert f"all {steps} steps were skipped, because no gradient was finite: nothing was trained" in run.error
    advice = "--compute float32" if compute == "float16" else "lower --learning-rate"
    assert advice in run.error
    assert f"note: {MANY_SKIPPED} steps in a row, up to {MANY_SKIPPED}, were skipped" in run.said
    assert run.said.count("steps in a row") == 1
    nothing_like_a_result(out)


# ---- formats -----------------------------------------------------------------------------------
def test_files_of_another_format_are_refused_by_name(run: Runner, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(out, "--max-steps", "4") == 0
    results, config = out / "results.json", out / "config.yaml"
    good = results.read_text()
    write_json(results, json.loads(good) | {"format": 7})
    assert run(out, "--resume", "--max-steps", "6") == 2
    assert f"{results} has format 7, and this version of wgrad reads format 1" in run.error
    results.write_text(good)
    config.write_text(config.read_text().replace("format: 1", "format: 7"))
    assert run(out, "--resume", "--max-steps", "6") == 2
    assert f"{config}: format must be 1; got 7" in run.error
    config.write_text(config.read_text().replace("format: 7\n", ""))
    metrics = out / "metrics.jsonl"
    text = metrics.read_text()
    metrics.write_text(text.replace('"format": 1', '"format": 7'))
    assert run(out, "--resume", "--max-steps", "6") == 2
    assert "metrics.jsonl was written by another version of wgrad" in run.error
    metrics.write_text(text)
    assert run(out, "--resume", "--max-steps", "6") == 0


# ---- warm-up -----------------------------------------------------------------------------------
def test_the_first_step_s_rate_is_as_help_says(run: Runner, tmp_path: Path) -> None:
    """transformers' first step has rate 0; ours has the peak over the steps of the warm-up, and help says so."""
    assert main(["finetune", "--help-all"]) == 0
    text = " ".join(run.capsys.readouterr().out.split())
    assert "the first step has LR / warm-up steps (transformers: 0)" in text
    assert run(tmp_path / "out", "--max-steps", "8", "--warmup-steps", "4", "--learning-rate", "4e-3") == 0
    rates = [r["lr"] for r in read_steps(tmp_path / "out" / "metrics.jsonl")]
    assert rates[:4] == [1e-3, 2e-3, 3e-3, 4e-3]
    assert warmup_steps(RunOptions(warmup_steps=0.03), 100) == 3


@pytest.mark.oracle
def test_transformers_is_a_step_behind_in_the_warm_up_and_equal_from_there_on() -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=4e-3)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 4, 12)
    theirs = []
    for _ in range(12):
        theirs.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    ours = [learning_rate(RunOptions(learning_rate=4e-3, warmup_steps=4), step, 12) for step in range(12)]
    assert theirs[:4] == pytest.approx([0.0, *ours[:3]])
    assert theirs[4:] == pytest.approx(ours[4:])
