"""Adapter files in PEFT's format, and which modules get an adapter."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.families.table import FAMILY_ROWS
from tests.train.conftest import tiny_config
from wgrad.device.errors import WgradError
from wgrad.train.files.safetensors_files import from_arrays, read_entries, write_safetensors
from wgrad.train.model import patterns
from wgrad.train.model.adapter_config import CONFIG_FILE, _unread, adapter_note
from wgrad.train.model.adapter_files import WEIGHTS_FILE, load_adapter, save_adapter
from wgrad.train.model.families import FAMILIES
from wgrad.train.model.load_config import parse_model_config
from wgrad.train.model.lora import LoraConfig, adaptable, init_lora, linear_modules, lora_shapes, match_targets
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.input_options import PROJECTIONS
from wgrad.train.step.lora_options import lora_config

MODULES = {f"model.layers.{i}.{m}": (24, 20) for i in range(3) for m in ("self_attn.q_proj", "mlp.up_proj")}
MODULES |= {f"model.layers.{i}.mlp.down_proj": (20, 36) for i in range(3)}


def values_for(lora: LoraConfig) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {n: generator.standard_normal(s).astype(np.float32) for n, s in lora_shapes(lora, MODULES).items()}


# ---- matching ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "targets, number",
    [
        (("q_proj",), 3),
        (("q_proj", "mlp.up_proj"), 6),
        (("model.layers.1.mlp.down_proj",), 1),
        ("all-linear", 9),
        (r"model\.layers\.[02]\..*(q|up)_proj", 4),
    ],
)
def test_targets_match_as_in_peft(targets: Any, number: int) -> None:
    found = match_targets(targets, list(MODULES))
    assert len(found) == number
    assert found == [m for m in MODULES if m in found]  # in the model's order


@pytest.mark.parametrize("targets", [("qproj",), ("q_proj", "lm_head"), "q_proj", ("proj",)])
def test_a_target_that_matches_nothing_names_what_there_is(targets: Any) -> None:
    with pytest.raises(WgradError, match="matches no projection of this model: it has down_proj, q_proj, up_proj"):
        match_targets(targets, list(MODULES))


def test_a_broken_regular_expression_is_refused() -> None:
    with pytest.raises(WgradError, match="is no regular expression"):
        match_targets("(q_proj", list(MODULES))


def test_patterns_set_rank_and_scaling_of_modules() -> None:
    lora = LoraConfig(
        r=4, alpha=8.0, rank_pattern={"layers.1.mlp.up_proj": 2, "q_proj": 16}, alpha_pattern={"down_proj": 1.0}
    )
    assert lora.rank_of("model.layers.1.mlp.up_proj") == 2
    assert lora.rank_of("model.layers.0.mlp.up_proj") == 4
    assert lora.scaling_of("model.layers.2.self_attn.q_proj") == 8 / 16
    assert lora.scaling_of("model.layers.2.mlp.down_proj") == 1 / 4
    rslora = LoraConfig(r=4, alpha=8.0, rslora=True)
    assert rslora.scaling_of("model.layers.0.mlp.up_proj") == 8 / math.sqrt(4)


def test_patterns_keep_their_order_in_a_file(tmp_path: Path) -> None:
    """The first that matches counts; in alphabetical order `up_proj` would."""
    ranks, alphas = {"layers.1.*.up_proj": 2, "up_proj": 5}, {"v.*": 3.0, "q_proj": 2.0, ".*": 1.0}
    lora = LoraConfig(r=4, alpha=8.0, target_modules=("q_proj", "up_proj"), rank_pattern=ranks, alpha_pattern=alphas)
    save_adapter(tmp_path, lora, values_for(lora), "org/name")
    again, _ = load_adapter(tmp_path, MODULES)
    assert list(again.rank_pattern.items()) == list(ranks.items())
    assert list(again.alpha_pattern.items()) == list(alphas.items())


@pytest.mark.parametrize(("text_of", "whole"), [("Qwen3_5", False), ("Voxtral", True), ("", False)])
def test_the_file_names_a_whole_model_only_if_transformers_loads_it(text_of: str, whole: bool, tmp_path: Path) -> None:
    lora, name = LoraConfig(r=4, alpha=8.0), text_of and f"{text_of}ForConditionalGeneration"
    save_adapter(tmp_path, lora, values_for(lora), "org/name", text_of=name)
    found = json.loads((tmp_path / "adapter_config.json").read_text())["auto_mapping"]
    assert found == ({"base_model_class": name, "parent_library": "transformers"} if whole else None)


def test_start_values() -> None:
    """B is zero; A is uniform within 1 / sqrt(in); the seed decides."""
    shapes = lora_shapes(LoraConfig(r=16, alpha=1.0), MODULES)
    first, again, other = init_lora(shapes, 3), init_lora(shapes, 3), init_lora(shapes, 4)
    for name, value in first.items():
        np.testing.assert_array_equal(value, again[name])
        if name.endswith("lora_B"):
            assert not value.any()
        else:
            bound = 1 / math.sqrt(value.shape[1])
            assert 0.9 * bound < np.abs(value).max() <= bound
            assert (value != other[name]).any()


# ---- files -------------------------------------------------------------------------------------
def test_an_adapter_comes_back_as_it_was(tmp_path: Path) -> None:
    lora = LoraConfig(
        r=3,
        alpha=7.5,
        dropout=0.1,
        rslora=True,
        target_modules=("q_proj", "down_proj"),
        rank_pattern={"layers.0.self_attn.q_proj": 2},
        alpha_pattern={"down_proj": 2.0},
    )
    values = values_for(lora)
    save_adapter(tmp_path / "a", lora, values, "org/name")
    loaded, again = load_adapter(tmp_path / "a", MODULES)
    assert loaded == LoraConfig(**{**vars(lora), "target_modules": ("down_proj", "q_proj")})
    assert list(again) == list(values)
    for name, value in values.items():
        np.testing.assert_array_equal(again[name], value)


def test_the_files_are_laid_out_as_peft_writes_them(tmp_path: Path) -> None:
    lora = LoraConfig(r=3, alpha=6.0, target_modules=PROJECTIONS[:1])
    save_adapter(tmp_path, lora, values_for(lora), "org/name")
    raw = json.loads((tmp_path / CONFIG_FILE).read_text())
    assert list(raw) == sorted(raw)
    wanted = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "org/name", "r": 3}
    assert wanted.items() <= raw.items() and raw["lora_alpha"] == 6 and isinstance(raw["lora_alpha"], int)
    entries = read_entries(tmp_path / WEIGHTS_FILE, "")
    assert entries["base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight"].shape == (3, 20)
    assert entries["base_model.model.model.layers.2.self_attn.q_proj.lora_B.weight"].shape == (24, 3)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    lora = LoraConfig(r=3, alpha=6.0, target_modules=("q_proj",))
    save_adapter(tmp_path / "saved", lora, values_for(lora), "org/name")
    return tmp_path / "saved"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"use_dora": True}, "lacks model.layers.0.self_attn.q_proj.lora_magnitude_vector"),
        ({"bias": "all"}, "trained biases cannot be read"),
        ({"modules_to_save": ["lm_head"]}, "whole modules next to the adapter cannot be read"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3': only LORA can be read"),
        ({"peft_type": None, "lora_parameters": {"rank": 8}}, "is of mlx-lm: fuse it there"),
        ({"trainable_token_indices": [3]}, r"_config.json: trainable_token_indices is \[3\]: .*: merge it with PEFT"),
        ({"exclude_modules": ["self_attn.q_proj"]}, "exclude_modules and layers_to_transform leave no projection"),
        ({"exclude_modules": "(q"}, r"exclude_modules: '\(q' is no regular expression"),
        ({"layers_to_transform": [3]}, "exclude_modules and layers_to_transform leave no projection"),
        ({"layers_to_transform": [0], "target_modules": ".*q_proj"}, "layers_to_transform goes with a list"),
        ({"layers_to_transform": [0], "layers_pattern": "("}, r"layers_pattern: '\(' is no regular expression"),
        ({"layers_to_transform": [0, 1]}, r"adapts model.layers.2.self_attn.q_proj.lora_A.weight, which is no proj"),
        (
            {"target_modules": ["q_proj", "lm_head"]},
            "has 'lm_head': LoRA on the embedding or the head is not read here",
        ),
        ({"target_modules": r".*(q_proj|embed_tokens)"}, "has 'embed_tokens': LoRA on the embedding or the head"),
        ({"init_lora_weights": "pissa_niter_16"}, "changes the base weights"),
        ({"target_modules": ["c_attn"]}, "'c_attn' matches no projection"),
        ({"target_modules": None}, "target_modules must name at least one module; got none"),
        ({"target_modules": ["q_proj", "up_proj"]}, "lacks model.layers.0.mlp.up_proj.lora_A"),
        ({"r": 4}, r"q_proj.lora_A in .* has shape \[3, 20\], the model asks for \[4, 20\]"),
    ],
)
def test_what_cannot_be_read_is_refused(changes: dict[str, Any], message: str, saved: Path) -> None:
    raw = json.loads((saved / CONFIG_FILE).read_text())
    (saved / CONFIG_FILE).write_text(json.dumps(raw | changes))
    with pytest.raises(WgradError, match=message):
        load_adapter(saved, MODULES)


def test_keys_of_a_newer_peft_are_told(saved: Path) -> None:
    """PEFT passes over them with a warning."""
    raw = json.loads((saved / CONFIG_FILE).read_text())
    assert adapter_note(load_adapter(saved, MODULES)[0]) == ""
    newer = {"use_spectral": True, "spectral_config": {"a": 1}, "use_other": False, "other": None}
    (saved / CONFIG_FILE).write_text(json.dumps(raw | newer))
    lora, _ = load_adapter(saved, MODULES)
    assert adapter_note(lora).endswith("not known, and not read: 'use_spectral', 'spectral_config'")


def test_every_key_of_peft_is_known() -> None:
    peft = pytest.importorskip("peft")
    raw = peft.LoraConfig(target_modules=["q_proj"], layers_to_transform=[0], layers_pattern="layers").to_dict()
    assert _unread({key: value or True for key, value in raw.items()}) == ()


def test_tensors_that_belong_to_nothing_are_refused(saved: Path) -> None:
    entries = read_entries(saved / WEIGHTS_FILE, "")
    arrays = {n: np.array(e.array()) for n, e in entries.items()}
    for extra, message in (
        ("base_model.model.lm_head.lora_A.weight", "adapts lm_head.lora_A.weight, which is no projection"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "is a DoRA adapter"),
    ):
        write_safetensors(saved / WEIGHTS_FILE, from_arrays(arrays | {extra: np.ones((3, 20), np.float32)}))
        with pytest.raises(WgradError, match=message):
            load_adapter(saved, MODULES)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused(value: float, saved: Path) -> None:
    entries = {name: np.array(entry.array()) for name, entry in read_entries(saved / WEIGHTS_FILE, "--adapter").items()}
    name = next(iter(entries))
    entries[name][1, 2] = value
    write_safetensors(saved / WEIGHTS_FILE, from_arrays(entries))
    with pytest.raises(
        WgradError, match=f"^--adapter: {name} in {saved / WEIGHTS_FILE} has values that are not finite"
    ):
        load_adapter(saved, MODULES)


def test_missing_files_are_named(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(WgradError, match="has no adapter_config.json: give the folder of a PEFT adapter"):
        load_adapter(tmp_path / "nowhere", MODULES)
    with pytest.raises(WgradError, match="has no adapter_config.json: give a folder in it, such as .*saved$"):
        load_adapter(tmp_path, MODULES)
    (saved / WEIGHTS_FILE).unlink()
    with pytest.raises(WgradError, match="adapter_model.safetensors is missing"):
        load_adapter(saved, MODULES)
    (saved / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(WgradError, match="has only adapter_model.bin"):
        load_adapter(saved, MODULES)


def test_the_command_line_names_projections_or_all_of_them() -> None:
    llama, phi3 = (parse_model_config(tiny_config(name)) for name in ("LlamaForCausalLM", "Phi3ForCausalLM"))
    assert lora_config(RunOptions(target_modules=("all-linear",)), phi3).target_modules == "all-linear"
    default = lora_config(RunOptions(), llama)
    assert default.target_modules == PROJECTIONS and default.r == 16 and default.alpha == 32.0
    fused = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    assert lora_config(RunOptions(), phi3).target_modules == fused
    assert lora_config(RunOptions(target_modules=("o_proj",)), phi3).target_modules == ("o_proj",)
    # Without the output of Mamba-2, where PEFT refuses it.
    falcon = parse_model_config(tiny_config("FalconH1ForCausalLM"))
    for options in (RunOptions(), RunOptions(target_modules=("all-linear",))):
        names = lora_config(options, falcon).target_modules
        assert set(names) == {"in_proj", *(f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down"))}
    ranked = lora_config(RunOptions(target_modules=("v_proj=4", "k_proj", "layers.1.self_attn.v_proj=7")), llama)
    assert ranked.target_modules == ("v_proj", "k_proj", "layers.1.self_attn.v_proj")
    paths = {layer: f"model.layers.{layer}.self_attn." for layer in (0, 1)}
    assert [ranked.rank_of(paths[layer] + part) for part in ("v_proj", "k_proj") for layer in (0, 1)] == [4, 7, 16, 16]


def test_an_adapter_of_all_projections_is_read_again_in_every_family(tmp_path: Path) -> None:
    """Embeddings have other names in some; Nemotron-H without Mamba-2 has no projection to leave out."""
    for name in FAMILIES:
        config = parse_model_config(tiny_config(name, **FAMILY_ROWS[name].all_linear))
        lora = LoraConfig(r=1, alpha=2.0, target_modules="all-linear")
        values = init_lora(lora_shapes(lora, linear_modules(config)), 0)
        save_adapter(tmp_path / name, lora, values, "base", config.in_peft)
        _, found = load_adapter(tmp_path / name, *adaptable(config))
        assert found.keys() == values.keys(), name


HOSTILE: dict[str, list[Any]] = {
    "r": [0, -1, 1.5, math.nan, 2**70, True, None, "8", [], {}],
    "lora_alpha": [None, "x", True, math.nan, math.inf, [], {}, 1e300, -1e300, 2**70],
    "lora_dropout": [None, -0.1, 1, 1.0, 1e300, "x", [], {}],
    "use_rslora": [None, 0, 1, "true", [], {}],
    "target_modules": [None, 3, True, {}, [3], [None], [[]], "", [], "(", "(" * 5000, "a{99999999999}", "x" * 100_000],
    "rank_pattern": ["x", 3, [], {"q_proj": 0}, {"q_proj": "x"}, {"q_proj": None}, {"q_proj": 2**70}, {"(": 2}],
    "alpha_pattern": ["x", 3, [], {"q_proj": "x"}, {"q_proj": None}, {"q_proj": 1e300}],
    "peft_type": [None, 3, [], {}, "lora", "x" * 100_000, "a\nb"],
    "init_lora_weights": [3, [], {}, "x", "a\nb"],
    "use_dora": [1, "x", [], {}],
    "modules_to_save": [1, "x", {}, [1]],
    "exclude_modules": [1, {}, [1], "("],
    "layers_to_transform": ["x", -1, 1.5, [-1], [None], {}],
    "layers_pattern": [1, {}, [1]],
}


@pytest.mark.parametrize("key", HOSTILE)
def test_values_that_no_adapter_has_are_refused_by_their_key(key: str, saved: Path) -> None:
    raw = json.loads((saved / CONFIG_FILE).read_text())
    for value in HOSTILE[key]:
        (saved / CONFIG_FILE).write_text(json.dumps(raw | {key: value}))
        with pytest.raises(WgradError, match="^--adapter: ") as caught:
            load_adapter(saved, MODULES)
        said = str(caught.value)
        named = re.search(rf"adapter_config.json: {key}|matches no projection|no regular expression|has shape", said)
        assert named and "\n" not in said, (value, said)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "[" * 100_000, '{"peft_type": "\\ud800"}'])
def test_an_adapter_config_that_is_no_object_is_refused(text: str, saved: Path) -> None:
    (saved / CONFIG_FILE).write_text(text)
    with pytest.raises(WgradError, match=r"^--adapter: .*adapter_config.json.*: fetch the file again$"):
        load_adapter(saved, MODULES)


@pytest.mark.parametrize("key", ["target_modules", "rank_pattern", "alpha_pattern"])
def test_a_regular_expression_without_end_is_ended(key: str, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 0.2)
    raw = json.loads((saved / CONFIG_FILE).read_text())
    endless = r"(\w+\.?)+x"
    (saved / CONFIG_FILE).write_text(json.dumps(raw | {key: endless if key == "target_modules" else {endless: 3}}))
    with pytest.raises(WgradError, match=r"adapter_config.json: a regular .* must be decided within 0.2 s; got"):
        load_adapter(saved, MODULES)


def test_regular_expressions_of_common_adapters_are_decided(saved: Path) -> None:
    """One as Unsloth writes it, and keys of patterns."""
    raw = json.loads((saved / CONFIG_FILE).read_text())
    raw["target_modules"] = (
        r"(?:.*?(?:self_attn|mlp).*?(?:q_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:mlp)\.(?:x_proj))"
    )
    raw |= {"rank_pattern": {r"layers\.\d+\.(self_attn|mlp)\.[a-p]_proj": 9}, "alpha_pattern": {".*q_proj": 2}}
    (saved / CONFIG_FILE).write_text(json.dumps(raw))
    lora, values = load_adapter(saved, MODULES)
    assert len(values) == 6 and lora.scaling_of("model.layers.0.self_attn.q_proj") == 2 / 3
