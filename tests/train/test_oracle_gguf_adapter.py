"""Adapters as GGUF files in llama.cpp (the package xllamacpp), with a base model that it loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import wgrad.train.model.gguf_adapter as gguf_adapter
from tests.families.table import FAMILY_ROWS
from tests.train.conftest import random_weights, tiny_config, write_checkpoint
from tests.train.gguf_base import write_base
from tests.train.llama_cpp_oracle import IN_GGUF, SIZES, in_llama_cpp, log_probabilities, their_log_probabilities
from tests.train.peft_oracle import our_logits, random_adapter, random_ids
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.errors import WgradError
from wgrad.train.commands.cli import main
from wgrad.train.files.gguf_traits import TRAITS, traits_of
from wgrad.train.model.adapter_files import save_adapter
from wgrad.train.model.families import FAMILIES
from wgrad.train.model.gguf_adapter import save_gguf_adapter
from wgrad.train.model.load_config import load_model_config, parse_model_config
from wgrad.train.model.lora import LoraConfig, linear_modules
from wgrad.train.step.build import build_frozen

pytestmark = pytest.mark.oracle

ADAPTERS = {
    "alpha": LoraConfig(r=6, alpha=9.0),
    "use_rslora": LoraConfig(r=6, alpha=9.0, rslora=True, target_modules=("q_proj", "k_proj")),
    "patterns": LoraConfig(r=6, alpha=9.0, rank_pattern={"k_proj": 3}, alpha_pattern={"q_proj": 2.0, "up_proj": 0.0}),
    "zero": LoraConfig(r=6, alpha=0.0),
}


@pytest.fixture
def adapted(tmp_path: Path) -> Callable[..., tuple[Path, np.ndarray, np.ndarray]]:
    """Return adapted(architecture, lora): an adapter's folder, and our log-probabilities without and with it.

    Next to the adapter are `model`, a checkpoint, and base.gguf, the same model.
    """

    def make(architecture: str, lora: LoraConfig) -> tuple[Path, np.ndarray, np.ndarray]:
        raw = in_llama_cpp(architecture, **FAMILY_ROWS[architecture].adapted_layers)
        weights = random_weights(raw)
        folder, adapter = write_checkpoint(tmp_path / "model", raw, weights), tmp_path / "adapter"
        config = load_model_config(folder)
        if traits_of(FAMILIES[architecture].gguf).shares:
            lora = replace(lora, target_modules=r"model\.layers\.(?!.*modality_router).*")
        write_base(tmp_path / "base.gguf", config, weights)
        save_adapter(adapter, lora, random_adapter(lora, linear_modules(config)), str(folder), config.in_peft)

        def ours(name: str | None) -> np.ndarray:
            model = build_frozen(config, folder, ReferenceDevice(), positions=64, adapter=name, quantize=False)
            return log_probabilities(our_logits(model, random_ids()))

        return adapter, ours(None), ours(str(adapter))

    return make


LATENT = [name for name in IN_GGUF if "kv_lora_rank" in tiny_config(name)]  # whose attention takes none in llama.cpp
CASES = [(name, "alpha") for name in IN_GGUF if name not in LATENT]
CASES += [("LlamaForCausalLM", kind) for kind in ADAPTERS if kind != "alpha"]


@pytest.mark.parametrize(("architecture", "kind"), CASES)
def test_llama_cpp_computes_what_we_do(architecture: str, kind: str, adapted: Any, tmp_path: Path, capsys: Any) -> None:
    adapter, plain, ours = adapted(architecture, ADAPTERS[kind])
    out = tmp_path / "adapter.gguf"
    assert main(["export", "--adapter", str(adapter), "--gguf-lora", str(out)]) == 0
    assert f"wrote {out}" in capsys.readouterr().out
    without, theirs = (their_log_probabilities(tmp_path / "base.gguf", random_ids(), name) for name in (None, out))
    limit = 2e-4 + 2 * np.abs(without - plain).max()  # its GELU is a table in float16
    assert limit < (0.02 if FAMILY_ROWS[architecture].gelu_table else 0.001)
    assert np.abs(theirs - ours).max() < limit
    assert np.array_equal(plain, ours) if kind == "zero" else np.abs(plain - ours).max() > 10 * limit


def test_an_adapter_that_llama_cpp_would_pass_over_is_refused(tmp_path: Path) -> None:
    config = parse_model_config(tiny_config("DeepseekV3ForCausalLM"))
    lora, path = LoraConfig(r=2, alpha=2.0, target_modules=("kv_b_proj", "o_proj")), tmp_path / "adapter.gguf"
    arrays = random_adapter(lora, linear_modules(config))
    with pytest.raises(WgradError, match="^--gguf-lora: llama.cpp does not apply an adapter of kv_b_proj .* merge it"):
        gguf_adapter.save_gguf_adapter(path, config, lora, arrays, np.dtype(np.float32), "--gguf-lora")
    rest = {name: value for name, value in arrays.items() if ".o_proj." in name}
    gguf_adapter.save_gguf_adapter(path, config, lora, rest, np.dtype(np.float32), "--gguf-lora")
    assert len(gguf.GGUFReader(path).tensors) == 4


def test_rows_as_hugging_face_has_them_are_another_adapter(adapted: Any, tmp_path: Path, monkeypatch: Any) -> None:
    adapter, _, ours = adapted("LlamaForCausalLM", ADAPTERS["alpha"])
    monkeypatch.setitem(TRAITS, "llama", replace(TRAITS["llama"], paired=False))
    assert main(["export", "--adapter", str(adapter), "--gguf-lora", str(tmp_path / "adapter.gguf")]) == 0
    theirs = their_log_probabilities(tmp_path / "base.gguf", random_ids(), tmp_path / "adapter.gguf")
    assert np.abs(theirs - ours).max() > 0.05


def test_an_adapter_in_float16_is_near_and_refused_beyond_its_range(adapted: Any, tmp_path: Path, capsys: Any) -> None:
    adapter, _, ours = adapted("LlamaForCausalLM", ADAPTERS["alpha"])
    out = tmp_path / "adapter.gguf"
    command = ["export", "--adapter", str(adapter), "--gguf-lora", str(out), "--type", "float16"]
    assert main([*command, "--modelfile", "llama3.2"]) == 0
    assert (tmp_path / "Modelfile").read_text() == "FROM llama3.2\nADAPTER ./adapter.gguf\n"
    theirs = their_log_probabilities(tmp_path / "base.gguf", random_ids(), out)
    assert 0 < np.abs(theirs - ours).max() < 0.02
    before = out.read_bytes()
    large = LoraConfig(r=6, alpha=9.0)
    arrays = random_adapter(large, linear_modules(load_model_config(tmp_path / "model")))
    save_adapter(adapter, large, {name: value * np.float32(1e6) for name, value in arrays.items()}, "another/base")
    assert main([*command, "--model", str(tmp_path / "model")]) == 2
    said = capsys.readouterr().err
    assert "more than float16 holds: use float32" in said
    assert said.startswith("note: the adapter names another/base as its base model, not ")
    assert out.read_bytes() == before


def test_what_lies_there_is_not_lost(adapted: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    adapter, _, _ = adapted("LlamaForCausalLM", ADAPTERS["alpha"])
    (tmp_path / "lora").mkdir()
    base, out, note = tmp_path / "base.gguf", tmp_path / "lora/adapter.gguf", tmp_path / "lora/Modelfile"
    before = base.read_bytes()
    command = ["export", "--adapter", str(adapter), "--gguf-lora"]
    assert main([*command, str(base)]) == 2
    assert "base.gguf is there and is no adapter in GGUF" in capsys.readouterr().err and base.read_bytes() == before
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # an adapter may be written again
        assert main([*command, "lora/adapter.gguf", "--modelfile", "base.gguf"]) == 0
    assert note.read_text() == "FROM ./../base.gguf\nADAPTER ./adapter.gguf\n"
    note.write_text("FROM llama3.2\nSYSTEM mine\n")
    out.unlink()
    assert main([*command, str(out), "--modelfile", str(base)]) == 2
    assert "is there and says something else" in capsys.readouterr().err and not out.exists()
    assert main([*command, str(out), "--modelfile", "none.gguf"]) == 2
    assert "--modelfile: no such file: none.gguf" in capsys.readouterr().err and not out.exists()


def test_wrong_options_and_models_are_refused_before_writing(adapted: Any, tmp_path: Path, capsys: Any) -> None:
    adapter, _, _ = adapted("LlamaForCausalLM", ADAPTERS["alpha"])
    folder = tmp_path / "model"

    def refused(message: str, *words: str, out: str = "adapter.gguf") -> None:
        assert main(["export", "--adapter", str(adapter), "--gguf-lora", str(tmp_path / out), *words]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "adapter.gguf").exists()

    refused("no such folder", out="missing/adapter.gguf")
    refused("no such folder", "--model", str(tmp_path / "missing"))
    refused("must be one of", "--type", "int8")
    refused("--modelfile: must name a base model on one line, got ''", "--modelfile", "")
    path = adapter / "adapter_config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"base_model_name_or_path": None}))
    refused("names no base model: give it with --model")
    path.write_text(json.dumps(raw))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    refused("the adapter belongs to another model")


@pytest.mark.parametrize(
    "module",
    ["model.per_layer_model_projection", "model.altup_projections.1", "model.layers.0.altup.modality_router"],
)
def test_llama_cpp_takes_no_adapter_of_some_modules(module: str, tmp_path: Path) -> None:
    config = parse_model_config(tiny_config("Gemma3nForCausalLM"))
    lora = LoraConfig(r=2, alpha=2.0)
    arrays = random_adapter(replace(lora, target_modules=r".*"), {module: linear_modules(config)[module]})
    with pytest.raises(WgradError, match=f"llama.cpp takes no adapter of {module}: merge it"):
        save_gguf_adapter(tmp_path / "adapter.gguf", config, lora, arrays, np.dtype(np.float32), "--gguf-lora")
    assert not (tmp_path / "adapter.gguf").exists()


def test_an_architecture_that_gguf_is_not_written_for_is_refused(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(FAMILIES, "Phi3ForCausalLM", replace(FAMILIES["Phi3ForCausalLM"], gguf=""))
    raw = tiny_config("Phi3ForCausalLM", **SIZES)
    folder, adapter = write_checkpoint(tmp_path / "model", raw, random_weights(raw)), tmp_path / "adapter"
    lora = LoraConfig(r=6, alpha=9.0)
    save_adapter(adapter, lora, random_adapter(lora, linear_modules(load_model_config(folder))), str(folder))
    assert main(["export", "--adapter", str(adapter), "--gguf-lora", str(tmp_path / "adapter.gguf")]) == 2
    assert "an adapter of Phi3ForCausalLM cannot be written into GGUF here" in capsys.readouterr().err
    monkeypatch.setitem(FAMILIES, "Phi3ForCausalLM", replace(FAMILIES["Phi3ForCausalLM"], no_gguf="does otherwise"))
    assert main(["export", "--adapter", str(adapter), "--gguf-lora", str(tmp_path / "adapter.gguf")]) == 2
    assert "has the architecture Phi3ForCausalLM, but llama.cpp does otherwise" in capsys.readouterr().err
    assert not (tmp_path / "adapter.gguf").exists()
