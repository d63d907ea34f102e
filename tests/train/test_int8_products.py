"""--int8-matmul: training learns nearly the same, in the memory planned; what is said, and where it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import wgpu_sibling
from wgrad.device.errors import DeviceError
from wgrad.train.commands.cli import main
from wgrad.train.data.packing import BatchStream, Document
from wgrad.train.model.load_config import load_model_config
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.plan.plan import plan_run
from wgrad.train.run import session
from wgrad.train.step.build import build_optimizer, build_trainable
from wgrad.train.step.compute import round_products
from wgrad.train.step.trainer import Trainer
from wgrad.wgsl.device import WgpuDevice

TOKENS = 80
STEPS = 8


def options(**given: Any) -> RunOptions:
    return RunOptions(
        **{"max_length": TOKENS, "batch_size": 2, "gradient_accumulation_steps": 1, "lora_r": 4, "max_steps": STEPS}
        | given
    )


def train(folder: Path, device: Any) -> np.ndarray:
    """[STEPS, 2]: losses of steps, of which all but the first two are replayed, and held-out ones."""
    config = options()
    built = build_trainable(config, load_model_config(folder), folder, device, positions=TOKENS)
    trainer = Trainer(built.model, build_optimizer(config, built.parameters), config)
    generator = np.random.default_rng(0)
    documents = [Document(generator.integers(0, 40, TOKENS).astype(np.int32), np.ones(TOKENS, bool)) for _ in range(4)]
    losses = []
    for step in BatchStream(documents, options(epochs=100)):
        trainer.step(step, 2e-3)
        losses.append((trainer.read_history()[0, 0], trainer.evaluate(step.batches)))
    return np.array(losses)


def test_it_learns_nearly_the_same_in_the_memory_planned(make_checkpoint: Any, wgpu_device: Any) -> None:
    folder = make_checkpoint()
    exact = train(folder, wgpu_sibling())
    assert exact[-1, 0] < 0.9 * exact[0, 0]
    device = wgpu_sibling()
    device.round_products()
    plan = plan_run(options(), load_model_config(folder), folder, device, 3)
    assert plan is not None and any(variant.shader == "gemm_int8" for variant in plan.dry.variants)
    kept = device.memory().in_use_bytes
    rounded = train(folder, device)
    assert (rounded != exact).all()
    np.testing.assert_allclose(rounded, exact, rtol=0.01)
    assert plan.peak_bytes == pytest.approx(device.memory().peak_bytes - kept, rel=0.05)


class Asked(DeviceError):
    """The device was asked to round."""


@pytest.mark.parametrize("command", ["finetune", "warm", "plan"])
def test_the_option_reaches_the_device(
    command: str, make_checkpoint: Any, text_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refuse(self: Any) -> None:
        raise Asked("it has faster ones")

    monkeypatch.setattr(WgpuDevice, "round_products", refuse)
    words = [command, "--model", str(make_checkpoint()), "--device", "wgpu", "--max-length", "48"]
    words += ["--data", str(text_data), "--out", str(tmp_path / "out")]
    assert main([*words, "--int8-matmul"]) == 2
    err = capsys.readouterr().err.splitlines()
    assert err[-1].endswith("--int8-matmul: it has faster ones: leave it out")
    assert not (tmp_path / "out").exists()


def test_int8_matmul_says_where_it_has_no_effect(
    make_checkpoint: Any, text_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    device: Any = wgpu_sibling()
    monkeypatch.setattr(session, "select_device", lambda spec, needs=None: device)
    words = ["finetune", "--model", str(make_checkpoint()), "--data", str(text_data), "--out", str(tmp_path / "out")]
    words += "--max-length 48 --no-sample --gradient-accumulation-steps 1 --max-steps 1 --int8-matmul".split()
    assert main([*words, "--full"]) == 2
    assert "--int8-matmul: would be ignored: --full has no frozen weights" in capsys.readouterr().err
    assert main(words) == 0
    said = "matmuls: frozen weights, and what they are multiplied with, are rounded to 8 bits (--int8-matmul)\n"
    assert said in capsys.readouterr().out
    assert device.int8_products and "int8_matmul: true" in (tmp_path / "out" / "config.yaml").read_text()


def test_all_parameters_are_trained_as_they_are(wgpu_device: Any) -> None:
    device = wgpu_sibling()
    assert round_products(options(full=True, int8_matmul=True), device) == [] and not device.int8_products
