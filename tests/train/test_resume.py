"""A run that is killed resumes to the same adapter, bit for bit; a broken checkpoint is passed over."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.conftest import random_weights, tiny_config, write_checkpoint, write_text_data
from wgrad.device.contract import Device
from wgrad.device.errors import WgradError
from wgrad.train.commands.cli import main
from wgrad.train.model.adapter_files import WEIGHTS_FILE
from wgrad.train.output.checkpoints import INFO_FILE, KEEP, STATE_FILE, Checkpoints
from wgrad.train.output.metrics import read_steps

STEPS = 24
PIPE = pytest.param("pipe", marks=pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here"))


def options_for(model: Path, data: Path, out: Path) -> list[str]:
    values: dict[str, Any] = {
        "--model": model,
        "--data": data,
        "--out": out,
        "--device": "cpu",
        "--lora-r": 3,
        "--max-length": 48,
        "--gradient-accumulation-steps": 2,
        "--max-steps": STEPS,
        "--save-steps": 3,
        "--logging-steps": 2,
        "--learning-rate": 5e-3,
        "--lora-dropout": 0.1,
        "--seed": 5,
    }
    return ["finetune", *(str(part) for pair in values.items() for part in pair)]


def without_rank(options: list[str]) -> list[str]:
    at = options.index("--lora-r")
    return options[:at] + options[at + 2 :]


def losses(out: Path) -> list[tuple[int, float, float]]:
    return [(r["step"], r["loss"], r["grad_norm"]) for r in read_steps(out / "metrics.jsonl")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, data, and a run that nothing interrupted."""
    folder, config = tmp_path_factory.mktemp("trained"), tiny_config()
    model = write_checkpoint(folder / "model", config, random_weights(config))
    assert main(options_for(model, write_text_data(folder), folder / "whole")) == 0
    return folder


@pytest.fixture
def whole(trained: Path, text_data: Path, tmp_path: Path, capsys: Any) -> Path:
    """Copy that run into a folder of the test."""
    shutil.copytree(trained / "model", tmp_path / "model")
    capsys.readouterr()
    return Path(shutil.copytree(trained / "whole", tmp_path / "whole"))


def same_result(out: Path, whole: Path) -> None:
    assert (out / WEIGHTS_FILE).read_bytes() == (whole / WEIGHTS_FILE).read_bytes()
    assert losses(out) == losses(whole) and len(losses(out)) == STEPS
    results = [json.loads((o / "results.json").read_text()) for o in (out, whole)]
    for key in ("held_out_loss_before", "held_out_loss_after", "sample_before", "sample_after", "steps"):
        assert results[0][key] == results[1][key], key


def test_a_run_killed_at_random_moments_ends_in_the_same_bits(whole: Path, text_data: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "wgrad.train.commands.cli", *options_for(tmp_path / "model", text_data, out)]
    chance = random.Random(int.from_bytes(os.urandom(4), "little"))
    kills, resumed = 0, 0
    for attempt in range(40):
        more = ["--resume"] if attempt else []
        before = newest(out)
        process = subprocess.Popen(command + more, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if kills < 3:
            # Once a step beyond the last checkpoint is out, kill at any moment: in a step, or in the middle of a save.
            while process.poll() is None and newest(out) <= before:
                time.sleep(0.002)
            time.sleep(chance.uniform(0, 0.1))
            process.kill()
        text = process.communicate()[0]
        resumed += "resuming from" in text
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, text
        assert not (out / "results.json").exists()
        kills += 1
    assert kills >= 1 and resumed == kills  # a fast machine may end before the third
    same_result(out, whole)
    assert not list(out.rglob("*.partial"))


def newest(out: Path) -> int:
    return max((int(p.name.removeprefix("step-")) for p in out.glob("checkpoints/step-*[0-9]")), default=0)


def interrupted(whole: Path, out: Path) -> None:
    """`out` as the run was right after its last checkpoint."""
    shutil.copytree(whole, out)
    for name in (WEIGHTS_FILE, "adapter_config.json", "results.json", "loss.svg"):
        (out / name).unlink()


@pytest.mark.parametrize("damage", ["none", "cut", "flip", "no info", PIPE, "leftover", "metrics", "all"])
def test_the_newest_whole_checkpoint_is_used(
    damage: str, whole: Path, text_data: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    interrupted(whole, out)
    steps = sorted((out / "checkpoints").iterdir(), key=lambda p: int(p.name[5:]))
    assert [p.name for p in steps] == ["step-21", "step-24"] and len(steps) == KEEP
    state = steps[-1] / STATE_FILE
    if damage == "cut":
        state.write_bytes(state.read_bytes()[:-9])
    elif damage == "flip":
        data = bytearray(state.read_bytes())
        data[-1000] ^= 1
        state.write_bytes(data)
    elif damage == "no info":
        (steps[-1] / INFO_FILE).unlink()
    elif damage == "pipe":  # to be opened for reading, it would be waited for
        (steps[-1] / "adapter_config.json").unlink()
        os.mkfifo(steps[-1] / "adapter_config.json")
    elif damage == "leftover":
        shutil.copytree(steps[-1], out / "checkpoints" / "step-27.12345.partial")
    elif damage == "metrics":
        path = out / "metrics.jsonl"
        path.write_text(path.read_text().replace("\n", '\n{"step": 3, "loss": "x"}\n', 1))
    elif damage == "all":
        for step in steps:
            (step / STATE_FILE).unlink()
    options = [*options_for(tmp_path / "model", text_data, out), "--resume"]
    if damage == "all":
        before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
        assert main(options) == 2
        error = capsys.readouterr().err
        assert "no checkpoint in" in error and "step-24: trainer.safetensors cannot be read" in error
        assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
        return
    found = Checkpoints(out).load()
    expected = 24 if damage in ("none", "leftover", "metrics") else 21
    assert found is not None and found.step == expected
    assert main(options) == 0
    said = capsys.readouterr().out
    assert ("step-24 is damaged (" in said) == (expected == 21) and f"resuming from {out}" in said
    assert ("metrics.jsonl: 1 line is no record of a run" in said) == (damage == "metrics")
    same_result(out, whole)


def test_a_finished_run_is_neither_overwritten_nor_run_again(
    trained: Path, whole: Path, text_data: Path, tmp_path: Path, capsys: Any
) -> None:
    options = options_for(trained / "model", trained / "data.jsonl", whole)  # no option differs
    before = (whole / WEIGHTS_FILE).stat().st_mtime_ns
    assert main(options) == 2
    assert "already holds a finished run" in capsys.readouterr().err
    assert main([*options, "--resume"]) == 0
    assert "this run is finished" in capsys.readouterr().out
    assert (whole / WEIGHTS_FILE).stat().st_mtime_ns == before
    interrupted(whole, tmp_path / "out")
    assert main(options_for(tmp_path / "model", text_data, tmp_path / "out")) == 2
    assert "holds an unfinished run: go on with --resume" in capsys.readouterr().err


def test_other_data_or_another_model_cannot_resume(
    whole: Path, text_data: Path, make_checkpoint: Any, tmp_path: Path, capsys: Any
) -> None:
    interrupted(whole, tmp_path / "out")
    options = [*options_for(tmp_path / "model", text_data, tmp_path / "out"), "--resume"]
    other = make_checkpoint("LlamaForCausalLM", name="other", rms_norm_eps=1e-4)
    assert main([*options, "--model", str(other)]) == 2
    assert "--resume: the base model is not what it was when" in capsys.readouterr().err
    text_data.write_text(text_data.read_text().replace("quick", "thick"))
    assert main(options) == 2
    assert "--resume: the training data" in capsys.readouterr().err
    assert losses(tmp_path / "out") == losses(whole)  # nothing was touched


def test_ctrl_c_says_what_is_saved_and_resumes_to_the_same_bits(whole: Path, text_data: Path, tmp_path: Path) -> None:
    out = tmp_path / "stopped"
    command = [sys.executable, "-m", "wgrad.train.commands.cli", *options_for(tmp_path / "model", text_data, out)]
    for _ in range(5):  # on a busy machine a run may end before this process sees its first checkpoint
        shutil.rmtree(out, ignore_errors=True)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while process.poll() is None and not newest(out):
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        errors = process.communicate()[1]
        if process.returncode:
            break
    assert process.returncode == 130, errors
    done = newest(out)
    assert errors == f"wgrad: interrupted after step {done} of {STEPS}, which is saved; go on with --resume\n"
    assert main([*options_for(tmp_path / "model", text_data, out), "--resume"]) == 0
    same_result(out, whole)


@pytest.mark.usefixtures("shared_pipelines")
def test_a_run_on_wgpu_resumes_to_the_same_bits(
    wgpu_device: Device, make_checkpoint: Any, text_data: Path, tmp_path: Path
) -> None:
    options = options_for(make_checkpoint(), text_data, tmp_path / "whole")
    options[options.index("--device") + 1] = "wgpu"
    assert main(options) == 0
    interrupted(tmp_path / "whole", tmp_path / "again")
    options[options.index("--out") + 1] = str(tmp_path / "again")
    assert main([*options, "--resume"]) == 0
    same_result(tmp_path / "again", tmp_path / "whole")


def test_an_adapter_is_trained_further(whole: Path, text_data: Path, tmp_path: Path) -> None:
    """--adapter starts where the other run ended, with that adapter's rank and scale."""
    options = options_for(tmp_path / "model", text_data, tmp_path / "more")
    options = without_rank(options)  # the adapter's own is used
    assert main([*options, "--adapter", str(whole), "--max-steps", "3"]) == 0
    first, second = (json.loads((o / "results.json").read_text()) for o in (whole, tmp_path / "more"))
    assert second["held_out_loss_before"] == first["held_out_loss_after"]
    assert second["sample_before"] == first["sample_after"]
    assert json.loads((tmp_path / "more" / "adapter_config.json").read_text())["r"] == 3
    assert (tmp_path / "more" / WEIGHTS_FILE).read_bytes() != (whole / WEIGHTS_FILE).read_bytes()


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    arrays = {"parameters": np.arange(70, dtype=np.float32)}
    for step in (2, 4, 10):
        Checkpoints(tmp_path).save(step, arrays, {"run": {}})
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-10", "step-4"]
    state = Checkpoints(tmp_path).load()
    assert state is not None and state.step == 10
    np.testing.assert_array_equal(state.arrays["parameters"], arrays["parameters"])


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_ones(tmp_path: Path) -> None:
    arrays = {"parameters": np.arange(70, dtype=np.float32)}
    Checkpoints(tmp_path).save(2, arrays, {"run": {}})

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(WgradError, match="the disk is full"):
        Checkpoints(tmp_path).save(4, arrays, {"run": {}}, full)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-2"]


def test_full_training_resumes_too(make_checkpoint: Any, text_data: Path, tmp_path: Path) -> None:
    model = make_checkpoint(dtype="bfloat16", tie_word_embeddings=True)
    options = without_rank(options_for(model, text_data, tmp_path / "full"))
    options[options.index("--lora-dropout") + 1] = "0"
    assert main([*options, "--full"]) == 0
    shutil.copytree(tmp_path / "full", tmp_path / "again")
    for name in ("model.safetensors", "results.json"):
        (tmp_path / "again" / name).unlink()
    options[options.index("--out") + 1] = str(tmp_path / "again")
    assert main([*options, "--full", "--resume"]) == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("full", "again")]
    assert weights[0] == weights[1]
    # The result is a checkpoint like any other: it can be fine-tuned in its turn.
    options[options.index("--out") + 1] = str(tmp_path / "second")
    options[options.index("--model") + 1] = str(tmp_path / "full")
    assert main([*options, "--lora-r", "3", "--max-steps", "2"]) == 0
