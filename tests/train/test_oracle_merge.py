"""Merged models: PEFT's values on the original weights, ours as trained on those of few bits, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

import wgrad.train.commands.merge as merge_command
from tests.families.table import FAMILY_ROWS
from tests.tools import oracle_package
from tests.train.conftest import distance, random_weights, tiny_config, write_checkpoint
from tests.train.gguf_writer import write_gguf
from tests.train.nf4_writer import save_nf4_checkpoint
from tests.train.peft_oracle import our_logits, random_adapter, random_ids, their_base, their_logits
from wgrad.autograd.reference import ReferenceDevice
from wgrad.train.commands.cli import main
from wgrad.train.files.safetensors_files import read_entries
from wgrad.train.model.adapter_files import save_adapter
from wgrad.train.model.families import FAMILIES
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.load_weights import load_frozen
from wgrad.train.model.lora import LoraConfig, linear_modules
from wgrad.train.step.build import build_frozen
from wgrad.train.step.find_model import other_base

peft = oracle_package("peft")

pytestmark = pytest.mark.oracle

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
LORA = LoraConfig(
    r=6,
    alpha=9.0,
    rslora=True,
    target_modules=r".*\.(q_proj|q_b_proj|kv_b_proj|up_proj|qkv_proj|gate_up_proj|down_proj|fc1|dense|c_attn|in_proj)",
)


@pytest.fixture
def adapted(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Return adapted(architecture, dtype), which writes a checkpoint, and an adapter that names it."""

    def make(architecture: str = "LlamaForCausalLM", dtype: str = "float32") -> tuple[Path, Path]:
        raw = tiny_config(architecture, **SIZES)
        folder, adapter = write_checkpoint(tmp_path / "model", raw, random_weights(raw), dtype), tmp_path / "adapter"
        config, lora = load_model_config(folder), LORA
        arrays = random_adapter(lora, linear_modules(config))
        if config.experts is not None:  # PEFT refuses the names of experts' projections one by one
            if not FAMILY_ROWS[architecture].adapted_mlps:  # of others it takes all of an MLP for those
                arrays = {name: value for name, value in arrays.items() if ".mlp." not in name}
            modules = [name.removesuffix(".lora_A") for name in arrays if name.endswith(".lora_A")]
            lora = lora.renamed({module: module for module in modules})
        save_adapter(adapter, lora, arrays, str(folder), config.in_peft)
        return folder, adapter

    return make


def merge(adapter: Path, out: Path, *words: str) -> int:
    return main(["merge", "--adapter", str(adapter), "--out", str(out), "--device", "cpu", *words])


def logits(folder: Path, adapter: Path | None = None, quantize: bool = False) -> np.ndarray:
    config, name = load_model_config(folder), str(adapter) if adapter else None
    model = build_frozen(config, folder, ReferenceDevice(), positions=64, adapter=name, quantize=quantize)
    return our_logits(model, random_ids())


@pytest.mark.parametrize("architecture", FAMILIES)
def test_onto_the_original_is_what_peft_merges(architecture: str, adapted: Any, tmp_path: Path) -> None:
    folder, adapter = adapted(architecture)
    assert merge(adapter, tmp_path / "merged", "--onto", "original", "--no-compare") == 0
    theirs = their_logits(peft.PeftModel.from_pretrained(their_base(folder), adapter).merge_and_unload(), random_ids())
    assert distance(their_logits(their_base(tmp_path / "merged"), random_ids()), theirs) < 1e-6
    assert distance(their_logits(their_base(folder), random_ids()), theirs) > 0.03
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "merged", "model"]


@pytest.mark.parametrize("kind", ["float", "nf4", "gguf"])
def test_onto_what_it_was_trained_on(kind: str, adapted: Any, tmp_path: Path, capsys: Any) -> None:
    folder, adapter = adapted()
    if kind == "nf4":
        weights = load_frozen(folder, load_model_config(folder), ReferenceDevice(), double_quant=False, block_size=128)
        shutil.copytree(folder, tmp_path / "base")
        raw = json.loads((folder / "config.json").read_text())
        save_nf4_checkpoint(tmp_path / "base", raw, weights, ReferenceDevice())
    elif kind == "gguf":
        shutil.copytree(folder, tmp_path / "base")
        (tmp_path / "base/model.safetensors").unlink()
        write_gguf(tmp_path / "base/model.gguf", random_weights(tiny_config(**SIZES)), Kind.Q8_0)
    base = folder if kind == "float" else tmp_path / "base"
    assert merge(adapter, tmp_path / "merged", "--model", str(base), "--dtype", "float32") == 0
    out = capsys.readouterr().out
    assert "likeliest token is the same at" in out and "KL divergence" in out
    assert distance(logits(tmp_path / "merged"), logits(base, adapter, quantize=True)) < 2e-6
    assert distance(logits(tmp_path / "merged"), logits(folder, adapter)) > 1e-3
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    if kind != "float":
        assert merge(adapter, tmp_path / "other", "--model", str(base), "--onto", "original") == 2
        assert "quantized: merge onto dequantized" in capsys.readouterr().err
        assert not (tmp_path / "other").exists()


def test_merged_weights_have_the_dtype_asked_for(adapted: Any, tmp_path: Path, capsys: Any) -> None:
    folder, adapter = adapted(dtype="bfloat16")
    exact = logits(folder, adapter)
    for name, limit in {"auto": 0.02, "float16": 0.003, "float32": 4e-6}.items():
        assert merge(adapter, tmp_path / name, "--onto", "original", "--dtype", name, "--no-compare") == 0
        written = json.loads((tmp_path / name / "config.json").read_text())["dtype"]
        assert written == ("bfloat16" if name == "auto" else name)
        assert limit / 20 < distance(logits(tmp_path / name), exact) < limit
    arrays = random_adapter(LORA, linear_modules(load_model_config(folder)))
    save_adapter(adapter, LORA, {n: v * np.float32(1e4) for n, v in arrays.items()}, str(folder))
    assert merge(adapter, tmp_path / "large", "--dtype", "float16") == 2
    assert "q_proj.weight has values that float16 does not hold: use bfloat16" in capsys.readouterr().err
    assert not (tmp_path / "large").exists()


def test_what_corrects_a_routers_scores_stays_in_float32(adapted: Any, tmp_path: Path) -> None:
    """As in the models' own files: its small differences choose experts."""
    folder, adapter = adapted("Glm4MoeForCausalLM")
    assert merge(adapter, tmp_path / "merged", "--onto", "original", "--dtype", "bfloat16", "--no-compare") == 0
    entries = read_entries(tmp_path / "merged/model.safetensors", "")
    kinds = {name.rpartition(".")[2]: entry.dtype for name, entry in entries.items()}
    assert kinds == {"weight": "BF16", "e_score_correction_bias": "F32"}
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    np.testing.assert_array_equal(entries[name].array(), read_entries(folder / "model.safetensors", "")[name].array())


def test_the_folder_must_be_new_and_the_disk_large_enough(
    adapted: Any, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    folder, adapter = adapted()
    assert merge(adapter, folder) == 2
    assert "is there already: give the name of a new folder" in capsys.readouterr().err
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert merge(adapter, tmp_path / "merged") == 2
    said = capsys.readouterr().err
    assert re.search(r"takes 0\.\d MiB in float32, and the disk has 0\.0 MiB free: free some space or choose", said)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "model"]


def test_a_merge_into_another_model_than_the_adapters_is_told(adapted: Any, tmp_path: Path, capsys: Any) -> None:
    """Such as one that it is merged into already. The base itself may have moved, or be a folder of the Hub's cache."""
    folder, adapter = adapted()
    assert merge(adapter, tmp_path / "merged", "--no-compare", "--model", str(folder)) == 0
    assert "the adapter names" not in capsys.readouterr().err
    assert merge(adapter, tmp_path / "twice", "--no-compare", "--model", str(tmp_path / "merged")) == 0
    wanted = f"the adapter names {folder} as its base model, not {tmp_path / 'merged'}: the result is right only if"
    assert wanted in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("named", "model", "told"),
    [
        ("meta-llama/Llama-3.2-1B", None, False),
        ("meta-llama/Llama-3.2-1B", "/models/llama-3.2-1b", False),
        ("meta-llama/Llama-3.2-1B", "/hub/models--meta-llama--Llama-3.2-1B/snapshots/4e20de3", False),
        ("meta-llama/Llama-3.2-1B", "/models/Llama-3.2-1B-Instruct", True),
        ("/hub/models--meta-llama--Llama-3.2-1B/snapshots/4e20de3", "meta-llama/Llama-3.2-3B", True),
        ("", "/models/llama-3.2-1b", False),  # it names none
    ],
)
def test_base_models_are_compared_by_name(tmp_path: Path, named: str, model: str | None, told: bool) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": named}))
    assert bool(other_base(model, str(tmp_path))) == told


def test_base_models_that_are_both_there_are_compared_by_place(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "model").mkdir(parents=True)
    base = str(tmp_path / "one" / "model")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    assert other_base(str(tmp_path / "two" / "model"), str(tmp_path))
    assert not other_base(f"{base}/../../one/model/.", str(tmp_path))


def test_a_merged_model_stays_if_the_comparison_fails(
    adapted: Any, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    _, adapter = adapted()

    def fail(*_: Any) -> None:
        raise merge_command.DeviceError("out of memory")

    monkeypatch.setattr(merge_command, "_compare", fail)
    assert merge(adapter, tmp_path / "merged") == 0
    assert "could not be compared: out of memory" in capsys.readouterr().err
    assert (tmp_path / "merged/model.safetensors").exists()


def test_logits_that_are_not_finite_are_told_behind_the_merge(adapted: Any, tmp_path: Path, capsys: Any) -> None:
    folder, adapter = adapted()
    arrays = random_adapter(LORA, linear_modules(load_model_config(folder)))
    save_adapter(adapter, LORA, {n: v * np.float32(1e15) for n, v in arrays.items()}, str(folder))
    with np.errstate(all="ignore"):
        assert merge(adapter, tmp_path / "merged") == 1
    assert "merged is written, but the logits of base and adapter are not finite" in capsys.readouterr().err


def test_a_sum_that_is_not_finite_is_not_written(adapted: Any, tmp_path: Path, capsys: Any) -> None:
    folder, adapter = adapted()
    arrays = random_adapter(LORA, linear_modules(load_model_config(folder)))
    save_adapter(adapter, LORA, {n: v * np.float32(1e30) for n, v in arrays.items()}, str(folder))
    assert merge(adapter, tmp_path / "merged") == 2
    assert "what model.layers.0.self_attn.q_proj adds to its weight is not finite" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


def test_the_difference_is_the_divergence_of_probabilities() -> None:
    same = merge_command.difference(np.eye(3), np.eye(3) + 5.0)
    assert (same.tokens, same.divergence, same.largest, same.agree) == (3, 0.0, pytest.approx(0, abs=1e-12), 3)
    other = merge_command.difference(np.log([[0.7, 0.3]]), np.log([[0.4, 0.6]]))
    assert other.divergence == pytest.approx(0.7 * np.log(0.7 / 0.4) + 0.3 * np.log(0.3 / 0.6))
    assert other.largest == pytest.approx(np.log(2)) and other.agree == 0
