"""--qat: a run trains against the weights that the merged GGUF file holds."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.conftest import PROVERBS, random_weights, tiny_config, write_checkpoint
from wgrad.autograd import functional as F
from wgrad.autograd.functional import LoraTerm
from wgrad.autograd.select_device import select_device
from wgrad.autograd.tensor import Tensor, parameter
from wgrad.device.errors import WgradError
from wgrad.device.formats.frozen_weight import formats
from wgrad.device.formats.gguf_quantize import ROUNDED
from wgrad.train.commands.cli import main
from wgrad.train.model.adapter_files import WEIGHTS_FILE
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.lora import LoraConfig
from wgrad.train.model.model_files import open_files
from wgrad.train.model.model_inputs import Inputs
from wgrad.train.model.qat import Rounding
from wgrad.train.model.weights import EMBEDDING, weight_specs
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.step import build
from wgrad.train.step.build import build_trainable

BASE_MODEL = Path(__file__).parents[2] / "examples" / "base_model"
# Rows of whole blocks of 256 and of 96, so that the mix of Q4_K has all types that are rounded to but Q4_0.
ROPE = {"position_embedding_type": "rope", "layer_types": ["attention"]}
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 96, "head_dim": 32, "num_hidden_layers": 1}


def words(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    steps = ("--max-steps", "3", "--gradient-accumulation-steps", "1", "--save-steps", "2", "--learning-rate", "0.01")
    given = ("--model", str(model), "--data", str(data), "--eval-data", str(data), "--out", str(out), *steps)
    return ["finetune", *given, "--max-length", "32", "--eval-tokens", "256", "--no-sample", *more]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    raw = tiny_config(tie_word_embeddings=True, **SIZES)
    return write_checkpoint(tmp_path / "model", raw, random_weights(raw))


def test_projections_that_the_file_splits_are_rounded(tmp_path: Path) -> None:
    """Gate and up in one projection, of which the file has two."""
    raw = tiny_config("GraniteMoeHybridForCausalLM", shared_intermediate_size=96, **ROPE, **SIZES)
    folder = write_checkpoint(tmp_path / "model", raw, random_weights(raw))
    formats = Rounding.of("q4_0", folder, load_model_config(folder)).formats
    for part in ("input", "output"):
        assert formats[f"model.layers.0.shared_mlp.{part}_linear.weight"].format == "q4_0"


@pytest.mark.parametrize(
    ("qat", "mix", "device"), [("q4_0", "q4_0", "cpu"), ("q4_k", "q4_k_m", "cpu"), ("q4_k", "q4_k_m", "wgpu")]
)
def test_the_merged_file_holds_the_weights_of_the_last_forward(
    qat: str, mix: str, device: str, model: Path, text_data: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """With what was rounded once, and what the run measured at its end; on a base that is NF4, and one that is not.
    q_proj has no adapter."""
    last: list[Any] = []
    plain = build.round_adapted

    def noted(*args: Any) -> None:
        last[:] = [args]
        plain(*args)

    monkeypatch.setattr(build, "round_adapted", noted)
    more = ["--qat", qat, "--device", device, "--target-modules", "v_proj,o_proj,up_proj,down_proj", "--use-rslora"]
    more += ["--no-quantize"] if qat == "q4_0" else []
    assert main(words(model, text_data, tmp_path / "run", *more)) == 0
    ((adapter, weights, used),) = last
    merged = ["--adapter", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--device", device]
    merged += [] if qat == "q4_0" else ["--no-compare"]
    assert main(["merge", *merged, "--format", "gguf", "--quantize", mix]) == 0
    said = capsys.readouterr()
    assert "makes other weights" not in said.err
    assert ("base and adapter without the rounding of --qat:" in said.out) == (qat == "q4_0")
    config, cpu = load_model_config(tmp_path / "out"), select_device("cpu")
    files = open_files(tmp_path / "out", config)[0]
    kinds = set()
    for spec in (spec for spec in weight_specs(config) if spec.kind == "projection"):
        module = adapter.modules.get(spec.name.removesuffix(".weight"))
        found = weights[spec.name] if module is None else module.rounded
        wanted = files.read_frozen(spec, cpu, True)
        kinds.add(wanted.format)
        assert found.format == wanted.format
        for name, array in wanted.arrays().items():
            assert array is not None
            np.testing.assert_array_equal(used.download(found.arrays()[name]).view(array.dtype), array, spec.name)
    assert kinds == ({"q4_0"} if qat == "q4_0" else set(ROUNDED) - {"q4_0"})
    embedding = next(spec for spec in weight_specs(config) if spec.name == EMBEDDING)
    np.testing.assert_array_equal(used.download(weights[EMBEDDING]), files.read(embedding))
    results = json.loads((tmp_path / "run/results.json").read_text())
    measured = ["--data", str(text_data), "--max-length", "32", "--eval-tokens", "256", "--device", device, "--json"]
    capsys.readouterr()
    assert main(["eval", "--model", str(tmp_path / "out"), *measured]) == 0
    nats = json.loads(capsys.readouterr().out)["base"]["nats"]
    assert nats == pytest.approx(results["held_out_loss_after"], rel=1e-5)
    assert abs(nats - results["held_out_loss_before"]) > 1e-3


@pytest.mark.all
def test_the_merged_file_is_as_good_as_the_adapter_on_its_base(tmp_path: Path, capsys: Any) -> None:
    """A model that has been trained, of which every tenth line is held out: at most 1.01 times the perplexity."""
    lines, nats = PROVERBS.read_text(encoding="utf-8").splitlines(keepends=True), dict[str, float]()
    train, held, out = tmp_path / "train.txt", tmp_path / "held.txt", tmp_path / "run"
    train.write_text("".join(line for i, line in enumerate(lines) if i % 10), encoding="utf-8")
    held.write_text("".join(lines[::10]), encoding="utf-8")
    common = ["--max-length", "128", "--eval-tokens", "0", "--device", "cpu"]
    given = ["--model", str(BASE_MODEL), "--data", str(train), "--eval-data", str(held), "--out", str(out), *common]
    given += ["--max-steps", "60", "--gradient-accumulation-steps", "2", "--learning-rate", "2e-3", "--no-quantize"]
    assert main(["finetune", *given, "--qat", "q4_0", "--no-sample"]) == 0
    merged = ["--adapter", str(out), "--out", str(tmp_path / "out"), "--device", "cpu", "--no-compare"]
    assert main(["merge", *merged, "--format", "gguf", "--quantize", "q4_0"]) == 0
    for name, model in (("adapter", ["--adapter", str(out)]), ("base", ["--model", str(tmp_path / "out")])):
        capsys.readouterr()
        assert main(["eval", *model, "--data", str(held), *common, "--no-quantize", "--json"]) == 0
        nats[name] = json.loads(capsys.readouterr().out)[name]["nats"]
    assert nats["base"] < nats["adapter"] + np.log(1.01)


def test_a_run_that_goes_on_ends_in_the_same_bits(model: Path, text_data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(words(model, text_data, run, "--qat", "q4_0", "--device", "cpu")) == 0
    wanted = (run / WEIGHTS_FILE).read_bytes()
    for name in (WEIGHTS_FILE, "results.json", "checkpoints/step-3/trainer.json"):
        (run / name).unlink()
    assert main(["finetune", "--out", str(run), "--resume"]) == 0
    assert (run / WEIGHTS_FILE).read_bytes() == wanted


def test_gradients_pass_the_rounding_as_if_it_were_not_there(rng: np.random.Generator) -> None:
    """Those of A and B are as beside a weight that has no part of them, that of x is of the rounded weight."""
    device = select_device("cpu")
    w, x, a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 64), (7, 64), (3, 64), (5, 3)))
    weight = formats()["q4_0"].empty(w.shape, device.empty)  # type: ignore[attr-defined]
    device.round_weight(w, weight)

    def results(rounded: bool) -> list[np.ndarray]:
        inputs = [parameter(value.copy(), device) for value in (x, a, b)]
        term = LoraTerm(inputs[1], inputs[2], 0.5, rounded=rounded)
        y = F.linear_quantized(inputs[0], weight, lora=term)
        y.backward(np.ones_like(y.data))
        return [y.data, *(np.array(tensor.grad.data) for tensor in inputs if tensor.grad is not None)]

    (y, dx, *of_term), (_, _, *others) = results(True), results(False)
    values = device.dequantize(weight)
    np.testing.assert_allclose(y, x @ values.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, np.ones_like(y) @ values, rtol=1e-5, atol=1e-5)
    for found, wanted in zip(of_term, others):
        np.testing.assert_array_equal(found, wanted)


def test_the_reference_of_preferences_is_not_rounded(model: Path) -> None:
    device = select_device("cpu")
    config = RunOptions(max_length=16, qat="q4_0", quantize=False)
    built = build_trainable(config, load_model_config(model), model, device, positions=16)
    module = "model.layers.0.self_attn.v_proj"
    assert built.model.adapter is not None
    x = Tensor(np.ones((1, 256), np.float32), device)
    linear = partial(built.model._linear, module, x, Inputs.empty(built.model, 1, 16))
    with built.model.without_adapter():
        plain = linear().data
    np.testing.assert_array_equal(plain, x.data @ built.model.weights[f"{module}.weight"].T)
    assert np.abs(linear().data - plain).max() > 1e-3


REFUSED: dict[str, Any] = {
    "full": True,
    "use_dora": True,
    "lora_variant": "own",
    "lora_dropout": 0.1,
    "train_embeddings": True,
    "train_head": True,
    "init_lora_weights": "pissa",
    "stream_weights": "on",
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_qat_does_not_round_are_refused(name: str) -> None:
    with pytest.raises(WgradError, match=f"^--qat: cannot be combined with --{name.replace('_', '-')}"):
        RunOptions(qat="q4_k", **{name: REFUSED[name]})


@pytest.mark.parametrize(
    ("lora", "what"),
    [({"dora": True}, "is a DoRA adapter"), ({"modules_to_save": ("lm_head",)}, "has lm_head whole")],
)
def test_adapters_that_qat_does_not_round_are_refused(
    lora: dict[str, Any], what: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "load_adapter", lambda *_: (LoraConfig(r=2, alpha=4.0, **lora), {}))
    config = RunOptions(max_length=8, qat="q4_0", adapter="run")
    with pytest.raises(WgradError, match=f"^--qat: run {what}, which is not rounded in training"):
        build_trainable(config, load_model_config(model), model, select_device("cpu"), positions=8)


def test_models_with_experts_are_refused(tmp_path: Path) -> None:
    raw = tiny_config("Qwen3MoeForCausalLM")
    folder = write_checkpoint(tmp_path / "experts", raw, random_weights(raw))
    with pytest.raises(WgradError, match="^--qat: Qwen3MoeForCausalLM has experts"):
        build_trainable(
            RunOptions(max_length=8, qat="q4_0"), load_model_config(folder), folder, select_device("cpu"), positions=8
        )


def test_without_the_package_it_says_what_to_install(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(WgradError, match=r"^--qat: its target is a GGUF file, which takes a package: pip inst"):
        Rounding.of("q4_0", model, load_model_config(model))


def test_formats_that_are_rounded_to_hold_every_type_of_the_mixes() -> None:
    assert {"q4_0", "q5_0", "q8_0", "q4_k", "q6_k"} == set(ROUNDED)
