"""--use-dora: resumed runs, readers of the adapter, weights in main memory, and options that exclude it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wgrad.device.contract import Device
from wgrad.train.commands.cli import main
from wgrad.train.inference.generation import generate_ids
from wgrad.train.model.adapter_files import WEIGHTS_FILE
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.lora import MAGNITUDE
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.generate_config import GREEDY
from wgrad.train.step.build import build_frozen, build_trainable, lora_parameters
from wgrad.train.step.optim import AdamW

pytestmark = pytest.mark.usefixtures("short_samples")


def options(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    given = ["--model", str(model), "--data", str(data), "--out", str(out), "--device", "cpu", "--max-length", "48"]
    return ["finetune", *given, "--gradient-accumulation-steps", "2", "--use-dora", *more]


@pytest.fixture
def run(make_checkpoint: Any, text_data: Path, tmp_path: Path, capsys: Any) -> Path:
    """Four steps."""
    more = "--max-steps 4 --lr-scheduler-type constant --warmup-steps 0 --learning-rate 0.01 --no-sample".split()
    more += ["--lora-r", "3", "--eval-data", str(text_data), "--save-steps", "2"]
    assert main(options(make_checkpoint(), text_data, tmp_path / "run", *more)) == 0
    capsys.readouterr()
    return tmp_path / "run"


def test_what_reads_the_adapter_finds_what_the_run_measured(run: Path, text_data: Path, capsys: Any) -> None:
    results = json.loads((run / "results.json").read_text())
    words = ["--adapter", str(run), "--data", str(text_data), "--max-length", "48"]
    assert main(["eval", *words, "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["base"]["nats"] == pytest.approx(results["held_out_loss_before"], rel=1e-5)
    assert found["adapter"]["nats"] == pytest.approx(results["held_out_loss_after"], rel=1e-5)
    assert found["adapter"]["nats"] < found["base"]["nats"]


def test_a_run_that_goes_on_ends_in_the_same_bits(run: Path) -> None:
    wanted = (run / WEIGHTS_FILE).read_bytes()
    for name in (WEIGHTS_FILE, "results.json", "checkpoints/step-4/trainer.json"):
        (run / name).unlink()
    assert main(["finetune", "--out", str(run), "--resume"]) == 0
    assert (run / WEIGHTS_FILE).read_bytes() == wanted


def test_lengths_of_an_adapter_that_stays_are_those_worked_out_each_time(run: Path, wgpu_device: Device) -> None:
    model = run.parent / "model"
    built = build_frozen(load_model_config(model), model, wgpu_device, positions=64, adapter=str(run))
    assert built.adapter is not None
    text = list(generate_ids(built, [5, 6, 7], 12, GREEDY))
    modules = {name: replace(module, inverse=None) for name, module in built.adapter.modules.items()}
    built.adapter = replace(built.adapter, modules=modules)
    assert list(generate_ids(built, [5, 6, 7], 12, GREEDY)) == text


def test_it_starts_alike_where_weights_are_in_main_memory(make_checkpoint: Any, wgpu_device: Device) -> None:
    folder, device = make_checkpoint(num_hidden_layers=4), type(wgpu_device)()
    device.shared_memory = False
    found = []
    for how in ("off", "on"):
        config = RunOptions(max_length=16, use_dora=True, stream_weights=how, compute="float32")
        built = build_trainable(config, load_model_config(folder), folder, device, positions=16)
        found.append(device.download(built.parameters.data))
    np.testing.assert_array_equal(found[0], found[1])


def test_options_without_meaning_for_dora_are_refused(run: Path, text_data: Path, tmp_path: Path, capsys: Any) -> None:
    def refused(*words: str) -> str:
        assert main(list(words)) == 2
        return str(capsys.readouterr().err).strip().splitlines()[-1]

    begun = options(run.parent / "model", text_data, tmp_path / "out")
    assert "--lora-dropout: 0.1 cannot be combined with --use-dora" in refused(*begun, "--lora-dropout", "0.1")
    assert "--init-lora-weights: pissa cannot be combined with --use-dora" in refused(
        *begun, "--init-lora-weights", "pissa"
    )
    assert "--use-dora: would be ignored: --adapter brings its own" in refused(*begun, "--adapter", str(run))
    further = [word for word in begun if word != "--use-dora"] + ["--adapter", str(run), "--lora-dropout", "0.1"]
    assert "is a DoRA adapter, which is trained without" in refused(*further)
    gguf = ["export", "--adapter", str(run), "--gguf-lora", str(tmp_path / "a.gguf")]
    assert "--gguf-lora: a GGUF adapter has no place for DoRA's magnitudes" in refused(*gguf)


def test_magnitudes_decay_and_whole_vectors_do_not(cpu: Device) -> None:
    """As PEFT's parameters in transformers' Trainer, which leaves out biases and norms."""
    values = {f"m{MAGNITUDE}": np.ones(3, np.float32), "m.lora_A": np.ones((2, 5), np.float32)}
    parameters = lora_parameters(values, cpu, whole={"head.bias": (3,)})
    parameters.set("head.bias", np.ones(3, np.float32))
    optimizer = AdamW(parameters, weight_decay=0.5)
    optimizer.set_lr(0.1)
    optimizer.step()
    found = {name: float(parameters.get(name).max()) for name in parameters.tensors}
    assert found == {f"m{MAGNITUDE}": pytest.approx(0.95), "m.lora_A": pytest.approx(0.95), "head.bias": 1.0}
