"""config.json: each key has its type and range, and whatever breaks them is one line that names the key."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.families.table import FAMILY_ROWS
from tests.fuzz.values import mutate_json
from tests.train.tiny_models import tiny_config
from wgrad.device.errors import WgradError
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.files.decode import parse_json
from wgrad.train.inference.generation import check_positions
from wgrad.train.inference.open_model import context_of
from wgrad.train.model.config_file import ConfigFile
from wgrad.train.model.expert_keys import ExpertsFile
from wgrad.train.model.families import FAMILIES
from wgrad.train.model.load_config import load_model_config, parse_model_config
from wgrad.train.model.lora import linear_modules
from wgrad.train.model.multimodal import MULTIMODAL
from wgrad.train.model.rope_scaling import ROPE_TYPES, rope_tables
from wgrad.train.model.save_model import save_description
from wgrad.train.model.weights import layer_flops, used_weights, weight_specs
from wgrad.train.options.finetune_config import FinetuneConfig
from wgrad.train.plan.fit import Fit
from wgrad.train.plan.lengths import beyond_positions
from wgrad.train.run.session import open_session

Config = Callable[..., dict[str, Any]]


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"architectures": ["BloomForCausalLM"], "model_type": None},
            "architecture BloomForCausalLM is not supported: use .*LlamaForCausalLM",
        ),
        ({"architectures": None, "model_type": "bert"}, "model_type 'bert' is not supported"),
        ({"model_type": "bloom"}, "model_type 'bloom', architecture LlamaForCausalLM is not supported"),
        ({"architectures": None, "model_type": None}, "model_type null is not supported"),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 2}}, "rope_type 'mrope' is not supported"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters of this architecture must be the same for all"),
        (
            {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0] * 6}},
            "needs short_factor, a number for each",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs factor, a number above 0; got none"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported: silu, .*, relu2 are"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads; got 4 and 3"),
        ({"head_dim": 7}, "head_dim .* must be even"),
        ({"vocab_size": None}, "vocab_size must be a whole number"),
        ({"vocab_size": "300"}, "vocab_size must be a whole number; got '300'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor 0.0 is not supported"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            r"quantized by 'hqq' \(load_in_4bit: false\) cannot be read",
        ),
    ],
)
def test_unsupported_configurations_are_refused(changes: dict[str, Any], message: str, make_config: Config) -> None:
    with pytest.raises(WgradError, match=message):
        parse_model_config(make_config() | changes)


PARTLY: dict[str, Any] = {"rotary_pct": 0.3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
FIRST_FALCON = {"new_decoder_architecture": False}


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("GPTJForCausalLM", {"rotary_dim": 14}, "rotary_dim must be even and at most 12, a head's numbers; got 14"),
        ("GPTNeoXForCausalLM", {"hidden_size": 50}, r"a whole number; got .* 50 / 4"),
        ("GPTNeoXForCausalLM", {"rotary_pct": 0.01}, "rotary_pct must leave an even number .* 2 at least; got 0.01"),
        ("GPTNeoXForCausalLM", PARTLY, "rotary_pct must leave an even number .*; got 0.3"),
        ("FalconForCausalLM", FIRST_FALCON | {"num_ln_in_parallel_attn": 2}, "must be 1 without new_.*; got 2"),
        (
            "FalconForCausalLM",
            FIRST_FALCON | {"multi_query": False},
            "num_kv_heads must .* without multi_query; got 2",
        ),
    ],
)
def test_sizes_of_heads_that_do_not_fit_are_refused(
    architecture: str, changes: dict[str, Any], message: str, make_config: Config
) -> None:
    with pytest.raises(WgradError, match=message):
        parse_model_config(make_config(architecture) | changes)


def test_the_share_of_a_head_that_is_rotated(make_config: Config) -> None:
    """30 of 44 numbers are rotated, though 44 * (30 / 44) lies below 30. rope_parameters replace GPT-NeoX's own key."""
    config = parse_model_config(make_config("GPTJForCausalLM") | {"hidden_size": 176, "rotary_dim": 30})
    assert rope_tables(config.rope, 1)[0].shape == (1, 15)
    partly = {"rope_parameters": PARTLY["rope_parameters"] | {"partial_rotary_factor": 0.5}}
    config = parse_model_config(make_config("GPTNeoXForCausalLM") | PARTLY | partly)
    assert rope_tables(config.rope, 1)[0].shape == (1, 3)


def test_nanochat_rotates_the_other_way_with_any_scaling(make_config: Config) -> None:
    for kind in ROPE_TYPES[:3] + ROPE_TYPES[-1:]:
        scaling = {"rope_scaling": {"rope_type": kind, "factor": 2.0}}
        assert parse_model_config(make_config("NanoChatForCausalLM") | scaling).rope.backwards, kind


def test_which_of_two_names_of_a_size_counts(make_config: Config) -> None:
    assert parse_model_config(make_config("FalconForCausalLM") | {"n_embed": 96}).hidden_size == 96
    others = {"n_embd": 96, "n_layer": 5, "n_head": 2, "n_positions": 9}
    assert parse_model_config(make_config("GPT2LMHeadModel") | others) == parse_model_config(
        make_config("GPT2LMHeadModel")
    )


def test_gpt_neox_has_biases_and_parallel_blocks_without_a_word(make_config: Config) -> None:
    said = make_config("GPTNeoXForCausalLM")
    silent = {key: value for key, value in said.items() if key not in ("attention_bias", "use_parallel_residual")}
    config = parse_model_config(silent)
    assert config.parallel and config.qkv_bias and config.o_bias
    config = parse_model_config(silent | {"attention_bias": False, "use_parallel_residual": False})
    assert not (config.parallel or config.qkv_bias or config.o_bias)


def test_every_family_has_layers_and_sizes(make_config: Config) -> None:
    for architecture in FAMILIES:
        for key in ("num_hidden_layers", "hidden_size", "vocab_size"):
            with pytest.raises(WgradError, match=f"{key} must be a whole number of at least 1; got 0"):
                parse_model_config(make_config(architecture) | {key: 0})


def test_more_heads_than_elements_are_refused_unless_heads_have_a_width_of_their_own() -> None:
    """`parse_model_config` divides by the width of a head only once it is checked."""
    refused = set()
    for architecture in FAMILIES:
        try:
            assert parse_model_config({"architectures": [architecture], "hidden_size": 1}).head_dim > 1
        except WgradError:
            refused.add(architecture)
    assert {"LlamaForCausalLM", "Qwen2ForCausalLM"} <= refused and "Qwen3ForCausalLM" not in refused


def test_an_empty_rope_scaling_is_none(make_config: Config) -> None:
    rope = {"rope_type": "default", "rope_theta": 50.0, "llama_4_scaling_beta": 0.1}
    rope |= {"original_max_position_embeddings": 8}
    for architecture, family in FAMILIES.items():
        by_layer = family.keys.local_theta is not ConfigFile.local_theta
        given = {"rope_parameters": {"full_attention": rope} if by_layer else rope}
        config = make_config(architecture) | given | {"rope_scaling": None}
        assert parse_model_config(config | {"rope_scaling": {}}) == parse_model_config(config), architecture


@pytest.mark.parametrize("architecture", ["Ministral3ForCausalLM", "Mistral4ForCausalLM"])
@pytest.mark.parametrize(
    "changes", [{"rope_type": "linear"}, {"rope_type": "dynamic", "original_max_position_embeddings": 8}]
)
def test_growth_of_queries_is_refused_where_it_is_not_supported(
    changes: dict[str, Any], architecture: str, make_config: Config
) -> None:
    rope = {"factor": 2.0, "llama_4_scaling_beta": 0.1, **changes}
    config = make_config(architecture) | {"rope_scaling": None, "rope_parameters": rope}
    with pytest.raises(WgradError, match="config.json: llama_4_scaling_beta"):
        parse_model_config(config)
    rope["rope_type"] = "yarn"  # for which transformers uses max_position_embeddings
    length = changes.get("original_max_position_embeddings", config["max_position_embeddings"])
    assert parse_model_config(config).query_length == length


@pytest.mark.all
def test_hostile_values_are_refused_in_every_family(make_config: Config) -> None:
    texts = [json.dumps(make_config(architecture)).encode() for architecture in FAMILIES]
    accepted = 0
    for number in range(20_000):
        rng = Random(number)
        with suppress(WgradError):
            raw = parse_json(mutate_json(rng, rng.choice(texts)), "config.json", from_python=True)
            config = parse_model_config(raw if isinstance(raw, dict) else {})
            assert list(weight_specs(config)) and linear_modules(config) and layer_flops(config, 64) > 0
            accepted += 1
    assert accepted > 3000


def test_a_token_is_multiplied_with_experts_of_the_width_of_latents() -> None:
    plain, latent = (
        parse_model_config(tiny_config("NemotronHForCausalLM", hybrid_override_pattern="EM", moe_latent_size=size))
        for size in (None, 22)
    )
    assert plain.experts and latent.experts and latent.hidden_size != 22
    chosen = 2 * plain.experts.chosen * plain.experts.width  # rows of up and columns of down
    into_and_back = 2 * 22 * latent.hidden_size
    assert used_weights(latent) - used_weights(plain) == chosen * (22 - latent.hidden_size) + into_and_back


# Keys that no family builds, with values that ask for them.
NOWHERE = {"use_cla": True, "alibi": True, "use_mla": True, "add_cross_attention": True, "num_kv_shared_layers": 2}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_is_not_built_is_refused_by_its_key(architecture: str, make_config: Config) -> None:
    raw = make_config(architecture)
    parse_model_config(raw)
    fields = FAMILIES[architecture].keys.__struct_fields__
    nowhere = {key: value for key, value in NOWHERE.items() if key not in fields}
    for key, value in {**nowhere, **FAMILY_ROWS[architecture].refused}.items():
        with pytest.raises(WgradError, match=rf"^config.json: .*{key}.* (must|is not supported)") as caught:
            parse_model_config(raw | {key: value})
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["Starcoder2", "Jais2", "Nemotron", "GPTBigCode", "GPTJ"])
def test_keys_that_transformers_does_not_read_are_ignored(name: str, make_config: Config) -> None:
    raw, others = make_config(f"{name}ForCausalLM"), ("qk_layernorm", "scale_attn_by_inverse_layer_idx")
    assert parse_model_config(raw | dict.fromkeys(others, True)) == parse_model_config(raw)


def test_sizes_of_mamba_may_be_null_in_models_without_it(make_config: Config) -> None:
    raw = make_config("GraniteMoeHybridForCausalLM")
    sizes = dict.fromkeys(("mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_n_heads", "mamba_expand"))
    flags = dict.fromkeys(("mamba_conv_bias", "mamba_proj_bias"))
    assert parse_model_config(raw | sizes | flags) == parse_model_config(raw)
    raw["layer_types"] = ["mamba", "attention"]
    assert parse_model_config(raw | flags) == parse_model_config(raw | dict.fromkeys(flags, False))
    for key in sizes:
        with pytest.raises(WgradError, match=f"{key} must be a number in models with Mamba-2; got null"):
            parse_model_config(raw | {key: None})


def test_kimi_k2_is_deepseek_v3(make_config: Config) -> None:
    """Kimi K2's files call DeepseekV3ForCausalLM so."""
    raw = make_config("DeepseekV3ForCausalLM")
    assert parse_model_config(raw | {"model_type": "kimi_k2"}) == parse_model_config(raw)


def test_no_family_is_asked_for_by_its_name() -> None:
    """Outside of the table: what a family has that others have not is a field."""
    root = Path(__file__).parents[2] / "train"
    names = "|".join((*FAMILIES, *MULTIMODAL))
    branch = re.compile(rf'(==|!=|\bin) *[(\["\w, ]*"({names})"')
    asked = [path.name for path in root.rglob("*.py") if branch.search(path.read_text(encoding="utf-8"))]
    assert asked == []


# Values that no key of a model can have, whatever the key is.
NEVER: list[Any] = [-1, 0, 1.5, 2**31 + 1, 2**63, 2**64, 2**70, 10**400, True, "", "x", [], [1], [[]], {}, {"a": 1}]
SIZES = [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
    "num_key_value_heads", "max_position_embeddings",
]  # fmt: skip
HOSTILE: dict[str, list[Any]] = {
    **{key: [*NEVER, None] for key in SIZES if key not in ("num_key_value_heads", "head_dim")},
    **{key: NEVER for key in ("num_key_value_heads", "head_dim", "sliding_window")},
    "max_window_layers": [-1, 1.5, "x", None, [], {}],
    "no_rope_layer_interval": [*NEVER, None],
    "rms_norm_eps": [-1e-9, 1, 1.0, 1e300, 2**70, None, True, "1e-5", [], {}],
    "rope_theta": [1, 1.0, 0, -1, 1e300, 2**70, True, "x", [], {}],
    "tie_word_embeddings": [0, 1, 2**70, None, "true", [], {}],
    "use_sliding_window": [0, 1, None, "true", [], {}],
    "attention_bias": [0, 1, None, "true", [], {}],
    "hidden_act": [None, 1, True, [], {}, ["silu"], "", "mish", "x" * 1000],
    "architectures": ["LlamaForCausalLM", {}, {"a": 1}, 3, True, [None], [3], [[]], ["Other"], ["\n"], ["x" * 1000]],
    "layer_types": [
        "x",
        {},
        3,
        [],
        ["full_attention"],
        [None, None],
        ["full_attention", "chunked_attention"],
        [[], []],
    ],
    "no_rope_layers": ["x", {}, 3, [], [1], [1, "x"], [1, None], [1.5, 1], [[], []]],
    "rope_scaling": ["x", 3, True, [], [1], {"rope_type": 3}, {"rope_type": []}, {"rope_type": "x"}, {"type": {}}],
    "partial_rotary_factor": [-1, 0.5, 2.0, 1e300, "x", [], {}],
    "original_max_position_embeddings": NEVER,
    "quantization_config": ["x", 3, [], {}, {"quant_method": 3}, {"quant_method": "bitsandbytes", "load_in_4bit": 1}],
}
FACTORS: list[Any] = [0, -1, 1e300, 2**70, 10**400, True, "x", [], {}]


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "SmolLM3ForCausalLM"])
@pytest.mark.parametrize("key", HOSTILE)
def test_values_that_no_model_has_are_refused_by_their_key(key: str, architecture: str, make_config: Config) -> None:
    """One line that names the key, whatever stands there; a key that the architecture does not have is not read."""
    looked_at = {"no_rope_layers": "SmolLM3", "no_rope_layer_interval": "SmolLM3", "max_window_layers": "Qwen3"}
    for value in HOSTILE[key]:
        raw = make_config(architecture, use_sliding_window=True, sliding_window=8) | {key: value}
        if key == "architectures":
            raw.pop("model_type")  # which counts before it
        if not architecture.startswith(looked_at.get(key, "")):
            parse_model_config(raw)
            continue
        with pytest.raises(WgradError) as caught:
            parse_model_config(raw)
        said = str(caught.value)
        names = {"architectures": "architecture", "rope_scaling": "rope", "quantization_config": "quantis|quantiz"}
        assert re.match("config.json: ", said) and re.search(names.get(key, key), said), (value, said)
        assert said.isprintable() and len(said) < 600 and "`" not in said, (value, said)


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "dynamic", "factor": 6.0}, 384),  # InternLM 3; transformers' formula has no other end
        ({"rope_type": "dynamic", "factor": 0.5}, 64),
        ({"rope_type": "dynamic", "factor": 6.0, "alpha": 50.0}, 64),  # HunYuan: another base alone
        ({"rope_type": "linear", "factor": 6.0}, 64),
        ({"rope_type": "yarn", "factor": 6.0, "original_max_position_embeddings": 16}, 64),
    ],
)
def test_dynamic_scaling_reads_beyond_the_positions_of_training(
    rope: dict[str, Any], positions: int, make_config: Config
) -> None:
    config = parse_model_config(make_config(max_position_embeddings=64, rope_scaling=rope))
    assert config.positions == positions
    check_positions(range(positions - 4), 4, config, "--max-new-tokens")
    with pytest.raises(WgradError, match=f"at most the {positions} positions"):
        check_positions(range(positions - 4), 5, config, "--max-new-tokens")
    opened: Any = SimpleNamespace(config=config, args=SimpleNamespace(context=positions))
    assert context_of(opened) == positions and not beyond_positions(positions, config)
    opened.args.context += 1
    with pytest.raises(WgradError, match=f"^--context: must be at most the {positions} positions"):
        context_of(opened)
    assert f"is beyond the {positions} positions" in beyond_positions(positions + 1, config)
    fits: Any = SimpleNamespace(model_config=config, _foreseen=lambda options, steps, before: steps)
    assert Fit.longest_rows(fits, {}) == positions


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_rope_values_that_no_model_has_are_refused(spelling: str, kind: str, make_config: Config) -> None:
    good = {"rope_type": kind, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    parse_model_config(make_config() | {spelling: good})
    wrong: list[tuple[str, Any]] = [(key, v) for key in ("factor", "rope_theta", "beta_fast") for v in FACTORS]
    wrong += [("original_max_position_embeddings", v) for v in NEVER] + [("rope_theta", 1), ("truncate", None)]
    wrong += [("attention_factor", v) for v in (-1, 1e300, "x")] + [("mscale", v) for v in (-1, "x")]
    if kind == "llama3":
        wrong += [("high_freq_factor", 0.99), ("high_freq_factor", 0.5), ("low_freq_factor", None)]
    for key, value in wrong:
        with pytest.raises(WgradError, match=rf"^config.json: .*{key}") as caught:
            parse_model_config(make_config() | {spelling: good | {key: value}})
        assert len(str(caught.value)) < 300


def test_whatever_is_accepted_gives_finite_tables(make_config: Config) -> None:
    """At the ends of each range."""
    for kind in ROPE_TYPES:
        for theta in (1.0000001, 1e15):
            for factor in (1e-6, 1e6):
                rope = {"rope_type": kind, "factor": factor, "low_freq_factor": 1e-6, "high_freq_factor": 1e6}
                rope |= {"original_max_position_embeddings": 1, "beta_fast": 1e-6, "beta_slow": 1e6}
                rope |= {"short_factor": [1e6] * 6, "long_factor": [1e-6, 1e6] * 3}
                config = parse_model_config(make_config() | {"rope_theta": theta, "rope_parameters": rope})
                for table in rope_tables(config.rope, 300):
                    assert np.isfinite(table).all(), (kind, theta, factor)


NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
YARN = {"rope_type": "yarn", "factor": 4.0}
IDENTITIES: list[tuple[str, dict[str, Any], str]] = [
    ("Llama", {"attention_bias": True, "quantization_config": NF4}, "e88f4f5faef4bcc9ce8c462bf43e7dc8"),
    ("Mistral", {"num_key_value_heads": 4}, "0f0be924987dfd8bb4cd84d339d70f10"),
    (
        "Qwen2",
        {"use_sliding_window": True, "max_window_layers": 1, "num_key_value_heads": 4},
        "6da4b6ec2fd68f39bfcebdf2cd4cc746",
    ),
    ("Qwen3", {"num_key_value_heads": 2, "hidden_act": "gelu_new"}, "74a45549bda90005f6b633d4d728359f"),
    (
        "SmolLM3",
        {"num_hidden_layers": 5, "use_sliding_window": True, "sliding_window": 9, "rope_scaling": YARN},
        "c04ace0f56b092f4587c901ab4c63ef3",
    ),
]


@pytest.mark.parametrize(("family", "changes", "digest"), IDENTITIES)
def test_checkpoints_know_a_configuration_by_its_identity(family: str, changes: dict[str, Any], digest: str) -> None:
    """trainer.json holds a sum of it: these are those of version 0.1.0, so that runs begun with that go on."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 8}
    raw = {"architectures": [f"{family}ForCausalLM"], **sizes, "intermediate_size": 8} | changes
    config = parse_model_config(raw)
    assert hashlib.blake2b(config.identity().encode(), digest_size=16).hexdigest() == digest
    longrope = replace(config.rope, long_factor=(1.0, 2.0))
    later = {"norm_offset": 1.0, "mlp_out_norm": "x", "score_softcap": 50.0, "rope": longrope, "local_rope": longrope}
    for name, value in later.items():
        assert replace(config, **dict[str, Any]({name: value})).identity() != config.identity()
    local = (replace(config, local_rope=replace(config.rope, long_factor=factor)) for factor in ((1.0,), (2.0,)))
    assert next(local).identity() != next(local).identity()


def test_a_missing_or_broken_config_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WgradError, match="has no config.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WgradError, match="--model: .*config.json line 1 is not valid JSON"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(WgradError, match=r"config.json: the whole must be an object; got \[\]"):
        load_model_config(tmp_path)


def test_model_type_counts_before_architectures(make_config: Config) -> None:
    """As in transformers' AutoModelForCausalLM, for which `architectures` is a remark."""
    qwen = parse_model_config(make_config("Qwen3ForCausalLM"))
    assert parse_model_config(make_config("Qwen3ForCausalLM") | {"architectures": ["LlamaForCausalLM"]}) == qwen
    assert parse_model_config(make_config("Qwen3ForCausalLM") | {"architectures": ["Unknown"]}) == qwen
    assert parse_model_config(make_config("Qwen3ForCausalLM") | {"model_type": None}) == qwen


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("MistralForCausalLM", {"sliding_window": None}),
        ("SmolLM3ForCausalLM", {}),
        ("Qwen2ForCausalLM", {"sliding_window": 5}),
        ("Gemma3ForCausalLM", {"sliding_window": None}),
        ("Qwen2MoeForCausalLM", {"sliding_window": 5}),
        ("Dots1ForCausalLM", {"sliding_window": None}),
    ],
)
def test_layers_that_slide_need_a_window(architecture: str, changes: dict[str, Any], make_config: Config) -> None:
    """transformers fails on these when the model is called."""
    raw = make_config(architecture) | changes
    listed = ["sliding_attention", "full_attention"]
    with pytest.raises(WgradError, match="sliding_attention, so sliding_window must be in use; it is null or off"):
        parse_model_config(raw | {"layer_types": listed})
    assert not any(parse_model_config(raw | {"layer_types": listed[1:] * 2}).windows)


def test_rope_keys_that_contradict_each_other_are_refused(make_config: Config) -> None:
    raw = make_config("Gemma3ForCausalLM") | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    with pytest.raises(WgradError, match="rope_scaling stands alongside rope_parameters without full_attention"):
        parse_model_config(raw | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})


def test_time_steps_beyond_a_float_are_refused(make_config: Config) -> None:
    raw = make_config("Mamba2ForCausalLM")
    with pytest.raises(WgradError, match="time_step_limit must be two numbers"):
        parse_model_config(raw | {"time_step_limit": [0.0, 10**400]})


@pytest.mark.parametrize(
    ("architecture", "changes", "asked"),
    [
        ("LlamaForCausalLM", {}, ()),
        ("LlamaForCausalLM", {"attention_dropout": 0.0, "hidden_dropout": 0.1}, ()),
        ("LlamaForCausalLM", {"attention_dropout": 0.25}, (("attention_dropout", 0.25),)),
        ("PhiForCausalLM", {"resid_pdrop": 0.1}, (("resid_pdrop", 0.1),)),
        ("PhimoeForCausalLM", {"input_jitter_noise": 0.01}, (("input_jitter_noise", 0.01),)),
        ("SeedOssForCausalLM", {}, (("attention_dropout", 0.1), ("residual_dropout", 0.1))),
        ("SeedOssForCausalLM", {"attention_dropout": 0, "residual_dropout": None}, ()),
    ],
)
def test_dropout_that_is_asked_for_is_listed(
    architecture: str, changes: dict, asked: tuple, make_config: Config
) -> None:
    raw = {key: value for key, value in make_config(architecture).items() if "drop" not in key}
    assert parse_model_config(raw | changes).dropouts == asked


def test_a_run_says_what_it_does_not_apply(
    make_checkpoint: Any, text_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The balance of experts belongs to sft alone."""
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 3)
    asks = {"output_router_logits": True, "router_aux_loss_coef": 0.25}
    model = str(make_checkpoint(architecture="OlmoeForCausalLM", **asks))
    said = "note: the experts' load-balancing loss of config.json (weight 0.25) is no part of --objective dpo"
    options: dict[str, Any] = {"model": model, "out": str(tmp_path / "out"), "device": "cpu"}
    for data, objective in ((pairs, "dpo"), (text_data, "sft")):
        open_session(FinetuneConfig(**options | {"data": (str(data),), "objective": objective}))
        out = capsys.readouterr().out
        assert (said in out, "load-balancing" in out) == (data is pairs, data is pairs)
    model = make_checkpoint(architecture="PhiForCausalLM", resid_pdrop=0.1, attention_dropout=0.05)
    open_session(FinetuneConfig(model=str(model), data=(str(text_data),), out=str(tmp_path / "out"), device="cpu"))
    said = "note: attention_dropout 0.05 and resid_pdrop 0.1 of config.json: not applied here, as transformers does"
    assert said in capsys.readouterr().out


def test_infinity_as_python_writes_it(make_checkpoint: Any, tmp_path: Path) -> None:
    """In a key that is not read it stays; in one that is it is named."""
    folder = make_checkpoint()
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("{", '{"time_step_limit": [0.0, Infinity], ', 1))
    config = load_model_config(folder)
    load_tokenizer(folder)
    save_description(tmp_path, folder, config, np.dtype(np.float32), lambda out: None)
    assert json.loads((tmp_path / "config.json").read_text())["time_step_limit"] == [0.0, math.inf]
    (folder / "config.json").write_text(text.replace("10000.0", "Infinity", 1))
    with pytest.raises(WgradError, match=r"config.json: rope_theta must be a number of at most 1\d+; got inf"):
        load_model_config(folder)


@pytest.mark.parametrize("name", sorted(name for name in FAMILIES if issubclass(FAMILIES[name].keys, ExpertsFile)))
def test_no_experts_make_all_layers_dense_or_are_refused(name: str) -> None:
    keys = FAMILIES[name].keys
    assert issubclass(keys, ExpertsFile)
    config = tiny_config(name) | dict.fromkeys(keys.count_keys, 0)
    assert keys.may_be_none == FAMILY_ROWS[name].may_have_no_experts
    if keys.may_be_none:
        assert parse_model_config(config).experts is None
    else:
        with pytest.raises(WgradError, match=f"{keys.count_keys[0]} must be at least 1; got 0"):
            parse_model_config(config)
