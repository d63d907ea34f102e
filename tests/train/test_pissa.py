"""--init-lora-weights pissa: what it subtracts from weights, resumed runs, and options that exclude it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.conftest import random_weights, tiny_config
from tests.train.nf4_writer import save_nf4_checkpoint
from wgrad.device.contract import Device
from wgrad.train.commands.cli import main
from wgrad.train.model.adapter_files import WEIGHTS_FILE, load_adapter
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.load_weights import load_frozen
from wgrad.train.model.lora import LoraConfig, linear_modules
from wgrad.train.model.pissa import PissaStart, start_within
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.step.build import build_trainable

pytestmark = pytest.mark.usefixtures("short_samples")

LORA = LoraConfig(r=5, alpha=3.0)
SHAPES = {"m.lora_A": (5, 37), "m.lora_B": (23, 5)}


def decaying() -> np.ndarray:
    """A weight [23, 37] whose singular values fall by a third each."""
    generator = np.random.default_rng(0)
    u, _, vt = np.linalg.svd(generator.standard_normal((23, 37)), full_matrices=False)
    return ((u * 1.5 ** -np.arange(23.0)) @ vt).astype(np.float32)


@pytest.mark.parametrize("kind", ["pissa", "pissa_niter_4"])
def test_the_largest_singular_values_go_to_the_adapter(kind: str) -> None:
    weight, start = decaying(), PissaStart(LORA, SHAPES, kind, seed=1)
    rest = start.residual("m", weight)
    assert start.residual("another", weight) is weight
    a, b = start.values["m.lora_A"], start.values["m.lora_B"]
    u, s, vt = np.linalg.svd(weight.astype(np.float64), full_matrices=False)
    np.testing.assert_allclose(0.6 * b @ a, (u[:, :5] * s[:5]) @ vt[:5], atol=1e-5)
    np.testing.assert_allclose(0.6 * b @ a + rest, weight, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(a, axis=1) ** 2, s[:5] / 0.6, rtol=1e-4)  # half of each value
    np.testing.assert_allclose(np.linalg.norm(b, axis=0) ** 2, s[:5] / 0.6, rtol=1e-4)


def test_a_start_that_is_known_is_taken_as_it_is() -> None:
    first = PissaStart(LORA, SHAPES, "pissa", seed=1)
    rest = first.residual("m", decaying())
    moved = {name: value + 1 for name, value in first.values.items()}
    known = start_within(first.as_lora(moved)[1])
    again = PissaStart(LORA, SHAPES, "pissa", seed=2, known=known)
    np.testing.assert_array_equal(again.residual("m", decaying()), rest)
    for name, value in first.values.items():
        np.testing.assert_array_equal(again.values[name], value)


def options(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    given = ["--model", str(model), "--data", str(data), "--out", str(out), "--device", "cpu", "--max-length", "48"]
    return [
        "finetune",
        *given,
        "--gradient-accumulation-steps",
        "2",
        "--init-lora-weights",
        "pissa_niter_4",
        "--no-sample",
        *more,
    ]


def test_a_run_that_goes_on_ends_in_the_same_bits(make_checkpoint: Any, text_data: Path, tmp_path: Path) -> None:
    model = make_checkpoint()
    constant = ["--lr-scheduler-type", "constant", "--warmup-steps", "0", "--lora-r", "3"]
    assert main([*options(model, text_data, tmp_path / "whole", "--max-steps", "4"), *constant]) == 0
    assert main([*options(model, text_data, tmp_path / "parts", "--max-steps", "2"), *constant]) == 0
    # What is found out anew on another machine may differ in the last bits: the start comes of the checkpoint.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PissaStart, "_decompose", None)
        assert main(["finetune", "--out", str(tmp_path / "parts"), "--resume", "--max-steps", "4"]) == 0
    whole, parts = (tmp_path / name / WEIGHTS_FILE for name in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()
    lora, arrays = load_adapter(tmp_path / "whole", linear_modules(load_model_config(model)))
    assert lora.r == 6 and all(6 in value.shape for value in arrays.values())


def test_a_randomized_start_has_the_seed_of_its_run(make_checkpoint: Any, cpu: Device) -> None:
    """Also of the largest rank, that of the whole projection."""
    folder, raw, starts = make_checkpoint(), tiny_config(), list[np.ndarray]()
    for seed in (1, 2, 1):
        more: dict[str, Any] = {"init_lora_weights": "pissa_niter_4", "target_modules": ("q_proj",), "lora_r": 48}
        options = RunOptions(max_length=8, seed=seed, **more)
        built = build_trainable(options, load_model_config(folder), folder, cpu, positions=8)
        starts.append(built.parameters.get("model.layers.1.self_attn.q_proj.lora_A"))
        assert built.total == built.parameters.count + sum(value.size for value in random_weights(raw).values())
    np.testing.assert_array_equal(starts[0], starts[2])
    assert not np.array_equal(starts[0], starts[1])
    plain = replace(options, init_lora_weights="lora", target_modules=("k_proj",))  # of [24, 48], which may have more
    assert build_trainable(plain, load_model_config(folder), folder, cpu, positions=8).parameters.count == 2 * 48 * 72


def test_options_without_meaning_for_pissa_are_refused(
    make_checkpoint: Any, text_data: Path, tmp_path: Path, capsys: Any, cpu: Device
) -> None:
    model = make_checkpoint()
    quantized = Path(shutil.copytree(model, tmp_path / "nf4"))
    weights = load_frozen(model, load_model_config(model), cpu)
    save_nf4_checkpoint(quantized, json.loads((model / "config.json").read_text()), weights, cpu)

    def refused(*more: str, base: Path = model) -> str:
        assert main(options(base, text_data, tmp_path / "out", *more)) == 2
        return str(capsys.readouterr().err).strip().splitlines()[-1]

    assert "--init-lora-weights: pissa_niter_4 leaves no base model for --objective dpo" in refused(
        "--objective", "dpo"
    )
    assert "--init-lora-weights: pissa_niter_4 takes its part out of weights in full precision" in refused(
        base=quantized
    )
    assert "--target-modules: a rank must be at most 24, the singular values of model.layers.0.self_attn.k_proj" in (
        refused("--target-modules", "q_proj=30", "k_proj=30")
    )
    assert "--init-lora-weights: would be ignored: --adapter brings its own" in refused("--adapter", "x")
