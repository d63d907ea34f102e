"""Merged models as GGUF files: llama.cpp (the package xllamacpp) computes and cuts words as we do; what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.families.common import HYBRID, LLAMA3_64, YARN_16
from tests.families.table import FAMILY_ROWS, of_families
from tests.train.conftest import random_weights, write_checkpoint
from tests.train.llama_cpp_oracle import IN_GGUF, in_llama_cpp, log_probabilities, their_log_probabilities
from tests.train.peft_oracle import our_logits, random_adapter, random_ids
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.errors import WgradError
from wgrad.train.commands.cli import main
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.files.gguf_metadata import read_metadata
from wgrad.train.model.adapter_files import load_adapter, save_adapter
from wgrad.train.model.gguf_model import _without_place
from wgrad.train.model.load_config import load_model_config, parse_model_config
from wgrad.train.model.lora import LoraConfig, adaptable, linear_modules
from wgrad.train.model.model_files import ModelFiles
from wgrad.train.model.weights import weight_specs
from wgrad.train.step.build import build_frozen

pytestmark = pytest.mark.oracle

LORA = LoraConfig(
    r=6,
    alpha=9.0,
    rslora=True,
    target_modules=r".*\.(q_proj|q_b_proj|kv_b_proj|query_key_value|up_proj|down_proj|fc2|c_proj|dense_4h_to_h|in_proj)",
)
TEXT = "It's 12,345 o'clock;\n\n  the harbour. Ünï – ok?<|end|>"


@pytest.fixture
def adapted(tmp_path: Path) -> Callable[..., Path]:
    """Return adapted(architecture, **config), which writes an adapter that names a checkpoint, `model` next to it."""

    def make(architecture: str = "LlamaForCausalLM", **changes: Any) -> Path:
        raw = in_llama_cpp(architecture, **changes)
        folder = write_checkpoint(tmp_path / "model", raw, random_weights(raw))
        config = load_model_config(folder)
        arrays = random_adapter(LORA, linear_modules(config))
        save_adapter(tmp_path / "adapter", LORA, arrays, str(folder), config.in_peft)
        return tmp_path / "adapter"

    return make


def merge(adapter: Path, out: Path, *words: str) -> int:
    words = ("--onto", "original", "--format", "gguf", "--no-compare", *words)
    return main(["merge", "--adapter", str(adapter), "--out", str(out), "--device", "cpu", *words])


def ours(
    folder: Path, adapter: Path | None = None, ids: np.ndarray | None = None, quantize: bool = False
) -> np.ndarray:
    name = str(adapter) if adapter else None
    model = build_frozen(
        load_model_config(folder), folder, ReferenceDevice(), positions=64, adapter=name, quantize=quantize
    )
    return log_probabilities(our_logits(model, random_ids() if ids is None else ids))


def theirs(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """llama.cpp's log-probabilities of the model in a folder, and the ids that they follow: the first of which it tells
    them."""
    for seed in range(1, 20):
        try:
            ids = random_ids(seed=seed)
            return their_log_probabilities(folder / "model.gguf", ids, None), ids
        except LookupError:
            continue
    raise AssertionError("llama.cpp told nothing")


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


CASES = of_families(lambda row: ({}, *row.gguf_cases, *row.merged_gguf), IN_GGUF)


@pytest.mark.parametrize(("architecture", "changes"), CASES)
def test_llama_cpp_computes_what_we_do(
    architecture: str, changes: dict[str, Any], adapted: Any, tmp_path: Path
) -> None:
    """In float32. Our own adapter on the base is what is asked for; Gemma's GELU is a table in float16 there."""
    adapter, out = adapted(architecture, **changes), tmp_path / "out"
    assert merge(adapter, out) == 0
    found, ids = theirs(out)
    wanted = ours(tmp_path / "model", adapter, ids)
    limit = 0.01 if FAMILY_ROWS[architecture].gelu_table else 5e-4
    assert distance(ours(out, ids=ids), wanted) < 2e-4
    assert distance(found, wanted) < limit
    assert distance(ours(tmp_path / "model", ids=ids), wanted) > 20 * limit
    if "rope_scaling" in changes:
        (tmp_path / "model/config.json").write_text(json.dumps(in_llama_cpp(architecture)))
        assert distance(ours(tmp_path / "model", adapter, ids), wanted) > 20 * limit


# Largest difference of a log-probability: ours from that of float32 (above and below), llama.cpp's from ours: it rounds
# activations, to 8 bits beside weights of few.
KINDS = {"f16": (2e-5, 0.01, 0.02), "q8_0": (0.05, 0.7, 0.4), "q4_0": (0.7, 8.0, 0.4), "mxfp4": (0.7, 8.0, 0.4)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_has_about_the_error_of_its_rounding(kind: str, adapted: Any, tmp_path: Path, capsys: Any) -> None:
    adapter, out = adapted(), tmp_path / "out"
    assert merge(adapter, out, "--quantize", kind) == 0
    assert f"wrote {out}/model.gguf: " in capsys.readouterr().out
    least, most, rounding = KINDS[kind]
    assert least < distance(ours(out), ours(tmp_path / "model", adapter)) < most
    found, ids = theirs(out)
    assert distance(found, ours(out, ids=ids)) < rounding
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out / "model.gguf").tensors}
    assert types["blk.1.ffn_down.weight"] == kind.upper() and types["output_norm.weight"] == "F32"
    assert types["token_embd.weight"] == ("Q8_0" if kind == "mxfp4" else kind.upper())
    assert types["output.weight"] == ("F16" if kind == "f16" else "Q8_0")  # or Q6_K, of rows of whole blocks


@pytest.mark.all
@pytest.mark.parametrize("kind", ["none", "q8_0", "q4_k_m", "mxfp4"])
def test_what_is_written_is_a_base_that_the_negated_adapter_leads_back_from(
    kind: str, adapted: Any, tmp_path: Path
) -> None:
    adapter, out, back = adapted(), tmp_path / "out", tmp_path / "back"
    assert merge(adapter, out, "--quantize", kind) == 0
    lora, arrays = load_adapter(adapter, *adaptable(load_model_config(out)))
    negated = {name: -value if name.endswith(".lora_B") else value for name, value in arrays.items()}
    save_adapter(tmp_path / "negated", lora, negated, str(out))
    words = ("--model", str(out), "--onto", "dequantized", "--quantize", "none", "--dtype", "float32")
    assert merge(tmp_path / "negated", back, *words) == 0
    merged, left = (ours(folder) for folder in (out, back))
    assert distance(left, merged) > 0.5
    assert distance(ours(back, adapter), merged) < 2e-3
    assert distance(left, ours(tmp_path / "model")) < (2e-3 if kind == "none" else KINDS.get(kind, KINDS["q4_0"])[1])


@pytest.mark.parametrize(("architecture", "width"), [("Qwen3_5", 16), ("Qwen3_5", 32), ("Qwen3Next", 16)])
def test_heads_of_values_in_another_order_are_written_for_llama_cpp(
    architecture: str, width: int, adapted: Any, tmp_path: Path
) -> None:
    """A block of few bits is of one head of 32 numbers, and goes across heads of 16: these columns are decoded."""
    widths = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), width)
    adapter, out = adapted(f"{architecture}ForCausalLM", **widths), tmp_path / "out"
    assert merge(adapter, out, "--quantize", "q8_0") == 0
    found, ids = theirs(out)
    assert distance(found, ours(out, ids=ids)) < 1 < 0.5 * distance(found, ours(tmp_path / "model", ids=ids))
    config, files = load_model_config(out), ModelFiles(out)
    files.check(config)
    frozen = {spec.name.rpartition("attn.")[2] for spec in weight_specs(config) if files.is_frozen(spec)}
    assert ("out_proj.weight" in frozen) == (width == 32 or architecture == "Qwen3Next")
    assert ("in_proj_qkvz.weight" if architecture == "Qwen3Next" else "in_proj_qkv.weight") in frozen


def test_onto_what_it_was_trained_on(adapted: Any, tmp_path: Path) -> None:
    """NF4, of which no file has the values; or, as the run's config.yaml says, the base model as it is."""
    adapter, out = adapted(), tmp_path / "out"
    assert merge(adapter, out, "--onto", "dequantized") == 0
    found, ids = theirs(out)
    assert distance(found, ours(tmp_path / "model", adapter, ids, quantize=True)) < 5e-4
    assert distance(found, ours(tmp_path / "model", adapter, ids)) > 0.05
    (adapter / "config.yaml").write_text("format: 1\nquantize: false\n")
    assert merge(adapter, tmp_path / "other", "--onto", "dequantized") == 0
    assert distance(ours(tmp_path / "other"), ours(tmp_path / "model", adapter)) < 1e-4


def test_as_its_run_or_an_option_says(adapted: Any, tmp_path: Path) -> None:
    """The blocks of the NF4 that it was trained on, of a run's adapter and of its checkpoints."""
    adapter, folders = adapted(), iter(range(9))

    def weights(adapter: Path, *words: str) -> dict[str, np.ndarray]:
        out = tmp_path / f"out-{next(folders)}"
        assert merge(adapter, out, "--onto", "dequantized", *SAFE, "--dtype", "float32", *words) == 0
        return {name: np.array(entry.array()) for name, entry in ModelFiles(out).entries.items()}

    def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
        return all(np.array_equal(a[name], b[name]) for name in a)

    usual, wide = weights(adapter), weights(adapter, "--block-size", "32", "--no-double-quant")
    assert not same(usual, wide)
    run = tmp_path / "run"
    shutil.copytree(adapter, run)
    shutil.copytree(adapter, run / "checkpoints/step-2")
    (run / "config.yaml").write_text("format: 1\nblock_size: 32\ndouble_quant: false\n")
    assert same(weights(run), wide) and same(weights(run / "checkpoints/step-2"), wide)
    assert same(weights(run, "--block-size", "64", "--double-quant"), usual)


def test_rows_of_no_whole_blocks_are_in_float16(adapted: Any, tmp_path: Path) -> None:
    assert merge(adapted(intermediate_size=100), tmp_path / "out", "--quantize", "q8_0") == 0
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "out/model.gguf").tensors}
    assert types["blk.0.ffn_down.weight"] == "F16" and types["blk.0.ffn_up.weight"] == "Q8_0"


def test_words_are_cut_as_ours(adapted: Any, tmp_path: Path) -> None:
    assert merge(adapted(), tmp_path / "out") == 0
    found = their_log_probabilities(tmp_path / "out/model.gguf", TEXT, None)
    ids = np.array([load_tokenizer(tmp_path / "model").encode(TEXT)], np.int32)
    assert 20 < ids.size < 64 and ids[0, -1] == 0  # <|end|> is one token
    assert distance(found, ours(tmp_path / "out", ids=ids)) < 5e-4


def test_a_gguf_base_is_named_by_its_file(adapted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not by the folder in the cache where it is laid out."""
    adapter, file = adapted(), tmp_path / "base/model.gguf"
    assert merge(adapter, file.parent) == 0
    assert merge(adapter, tmp_path / "out", "--model", str(file), "--onto", "dequantized") == 0
    assert f"wrote {tmp_path}/out/model.gguf: {file} with {adapter} merged onto" in capsys.readouterr().out


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_a_gguf_base_keeps_what_its_file_says(architecture: str, adapted: Any, tmp_path: Path) -> None:
    adapter = adapted(architecture, **({"rope_scaling": LLAMA3_64} if architecture == "LlamaForCausalLM" else {}))
    assert merge(adapter, tmp_path / "base", "--quantize", "q8_0") == 0
    words = ("--model", str(tmp_path / "base"), "--onto", "dequantized", "--dtype", "float32")
    assert merge(adapter, tmp_path / "out", *words) == 0
    assert merge(adapter, tmp_path / "plain", *words, "--format", "safetensors") == 0
    before, after = (
        {entry.key: entry[1:] for entry in read_metadata(tmp_path / name / "model.gguf", "--model")}
        for name in ("base", "out")
    )
    assert before.pop("general.file_type")[0] == 7 and after.pop("general.file_type")[0] == 0
    assert before == after and len(after["tokenizer.ggml.tokens"][0]) == 300
    found, ids = theirs(tmp_path / "out")
    wanted = ours(tmp_path / "base", adapter, ids)
    limit = 0.01 if architecture.startswith("Gemma") else 5e-4
    assert distance(ours(tmp_path / "out", ids=ids), wanted) < 1e-4
    assert distance(ours(tmp_path / "plain", ids=ids), wanted) < 1e-4
    assert distance(found, wanted) < limit


@pytest.mark.all
@pytest.mark.parametrize("changes", [{"head_dim": 24}, {"rope_scaling": LLAMA3_64}, {"attention_bias": True}])
@pytest.mark.parametrize("architecture", IN_GGUF)
def test_what_is_written_can_be_loaded(
    architecture: str, changes: dict[str, Any], adapted: Any, tmp_path: Path, capsys: Any
) -> None:
    """A model that the architecture in llama.cpp lacks is refused; else llama.cpp computes the same."""
    try:
        adapter = adapted(architecture, **changes)
    except WgradError:
        return  # no such model is trained
    if merge(adapter, tmp_path / "out") == 0:
        found, ids = theirs(tmp_path / "out")
        assert distance(found, ours(tmp_path / "model", adapter, ids)) < 0.01
    else:
        assert "which cannot be written into GGUF here" in capsys.readouterr().err


def test_options_and_models_that_gguf_does_not_hold_are_refused(adapted: Any, tmp_path: Path, capsys: Any) -> None:
    adapter = adapted()

    def refused(message: str, *words: str) -> None:
        assert merge(adapter, tmp_path / "out", *words) == 2
        assert message in capsys.readouterr().err
        assert not list(tmp_path.glob("out*"))

    refused("--quantize: needs --format gguf, got --format safetensors: add it", *SAFE, "--quantize", "q8_0")
    refused("give only one of the two", "--quantize", "q8_0", "--dtype", "float16")
    arrays = random_adapter(LORA, linear_modules(load_model_config(tmp_path / "model")))
    save_adapter(adapter, LORA, {n: v * np.float32(1e4) for n, v in arrays.items()}, str(tmp_path / "model"))
    refused("which F16 does not hold: use --quantize q8_0", "--quantize", "f16")
    save_adapter(adapter, LORA, {n: v * np.float32(1e6) for n, v in arrays.items()}, str(tmp_path / "model"))
    refused("which Q8_0 does not hold: use --quantize none", "--quantize", "q8_0")
    path = tmp_path / "model/tokenizer.json"
    text = path.read_text()
    raw = json.loads(text)
    path.write_text(json.dumps(raw | {"pre_tokenizer": {"type": "Whitespace"}}))
    refused(
        "byte-level BPE that cuts words as one of gpt-2, smollm, llama-bpe, qwen2, gpt-4o, tekken, qwen35, "
        "deepseek-v3, or SentencePiece's BPE: use"
    )
    path.write_text(text)
    adapter = adapted("MistralForCausalLM", sliding_window=32)
    refused("has a sliding window of 32 tokens, which cannot be written into GGUF here: use --format safetensors")
    others: list[tuple[str, dict[str, Any], str]] = [
        ("GemmaForCausalLM", {"tie_word_embeddings": False}, "a tensor lm_head.weight"),
        ("Phi3ForCausalLM", {"sliding_window": 32}, "a sliding window of 32 tokens, which"),
        ("Olmo2ForCausalLM", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic scaling"),
        ("Olmo3ForCausalLM", {"rope_scaling": {**YARN_16, "attention_factor": 1.3}}, "yarn scaling"),
        ("Olmo3ForCausalLM", {"rope_theta": 1e4}, "rotary embeddings of its own in sliding layers"),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 25}, "scores scaled by 0.2,"),
        ("Qwen2ForCausalLM", {"head_dim": 24}, "heads of 24 elements instead of hidden_size / num_attention_heads"),
        ("Qwen2ForCausalLM", {"rope_scaling": LLAMA3_64}, "llama3 scaling"),
        ("Qwen3ForCausalLM", {"attention_bias": True}, "a tensor model.layers.0.self_attn.q_proj.bias"),
        ("GemmaForCausalLM", {"attention_bias": True}, "a tensor model.layers.0.self_attn.q_proj.bias"),
        (
            "Gemma3ForCausalLM",
            {"sliding_window_pattern": 4},
            "a sliding window of 4096 tokens in other layers than",
        ),
        ("LlamaForCausalLM", {"hidden_act": "relu"}, "the activation relu"),
        ("CohereForCausalLM", {"use_qk_norm": True}, "norms of heads in 2 layers"),
        ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "scores divided by the number of their layer,"),
        (
            "FalconForCausalLM",
            {"alibi": True, "num_kv_heads": 4},
            "ALiBi, but llama.cpp rotates queries and keys instead: use --format safetensors\n",
        ),
        ("OlmoeForCausalLM", {"clip_qkv": 0.7}, "queries, keys and values clipped to 0.7, but"),
        ("GemmaForCausalLM", {"hidden_act": "silu"}, "the activation silu"),
        ("PhiForCausalLM", {"hidden_act": "silu"}, "the activation silu"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "rotary embeddings in other layers than smollm3 has them"),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": None}, "soft caps where gemma2 has none, or none where"),
        ("Gemma3ForCausalLM", {"final_logit_softcapping": 3.0}, "soft caps where gemma3 has none"),
        ("Gemma3ForCausalLM", {"rope_local_base_freq": 500.0}, "rotary embeddings of its own in sliding layers"),
    ]
    adapter = adapted("PhimoeForCausalLM")
    refused("has the architecture PhimoeForCausalLM, but llama.cpp weights the two experts by a softmax over both")
    for architecture, changes, what in others:
        adapter = adapted(architecture, **changes)
        refused(f"has {what}")


@pytest.mark.parametrize(
    ("architecture", "changes", "what"),
    [
        (
            "Gemma3nForCausalLM",
            {"laurel_rank": 32},
            "AltUp of 4 streams, LAuReL of rank 32 and per-layer embeddings of",
        ),
        ("Gemma3nForCausalLM", {"final_logit_softcapping": 20.0}, "logits capped at 20"),
        ("Gemma3nForCausalLM", {"activation_sparsity_pattern": [0.95, 0.0]}, "other sparse activations"),
        ("Gemma3nForCausalLM", {"intermediate_size": [96, 64]}, "MLPs of several widths"),
        (
            "Gemma3nForCausalLM",
            {"layer_types": ["full_attention"] * 2},
            "a sliding window in other layers than gemma3n",
        ),
        (
            "Gemma3nForCausalLM",
            {"layer_types": ["sliding_attention"] * 2, "num_kv_shared_layers": 1},
            "keys and values shared by other layers than those from 20 on",
        ),
        (
            "Gemma4ForCausalLM",
            {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 1},
            "layers that use the keys of others than the last two with their own",
        ),
        ("Gemma4ForCausalLM", {"hidden_activation": "silu"}, "the activation silu"),
        ("Llama4ForCausalLM", {"moe_layers": [1, 2]}, "experts in other layers than every N-th"),
        ("Llama4ForCausalLM", {"moe_layers": []}, "no layer with experts"),
        ("Llama4ForCausalLM", {"use_qk_norm": False}, "no norms of heads with"),
        ("Llama4ForCausalLM", {"no_rope_layers": [1, 1, 0, 1]}, "rotary embeddings in other layers than llama4"),
        ("Llama4ForCausalLM", {"attention_chunk_size": 64}, "attention in chunks of 64 tokens"),
        ("Llama4ForCausalLM", {"layer_types": ["full_attention"] * 4}, "attention in chunks of 8192 tokens, or in"),
        ("Llama4ForCausalLM", {"floor_scale": 99}, "queries that grow by 0.1 after 99 positions"),
        ("Llama4ForCausalLM", {"attention_bias": True}, "a tensor model.layers.0.self_attn.q_proj.bias"),
        (
            "LagunaForCausalLM",
            {"layer_types": ["sliding_attention"] * 3},
            "a sliding window of 7 tokens in other layers than laguna has it",
        ),
        ("Cohere2MoeForCausalLM", {"layer_types": ["full_attention"] * 3}, "no layer with a sliding window"),
        ("LagunaForCausalLM", {"mlp_layer_types": ["dense"] * 3}, "no layer with experts"),
        ("MellumForCausalLM", {"tie_word_embeddings": True}, "one matrix for embedding and head"),
        ("MellumForCausalLM", {"mlp_layer_types": ["dense", "sparse"]}, "layers without experts"),
        ("MellumForCausalLM", {"mlp_layer_types": ["dense"] * 2}, "no layer with experts"),
        ("MellumForCausalLM", {"rope_parameters": None}, "rotary embeddings of its own in sliding layers"),
        (
            "Cohere2MoeForCausalLM",
            {"shared_expert_combination_strategy": "sum"},
            "experts and shared experts whose outputs are added",
        ),
        (
            "Cohere2MoeForCausalLM",
            {"first_k_dense_replace": 2, "prefix_dense_sliding_window_pattern": 2},
            "rotary embeddings in other layers than cohere2moe",
        ),
        (
            "GraniteSWAForCausalLM",
            {"layer_rope_theta": [500.0, 70.0, 70.0]},
            "rotary embeddings of its own in sliding layers",
        ),
        ("HYV3ForCausalLM", {"mlp_layer_types": ["sparse", "dense"]}, "layers without experts after layers with"),
        ("GptOssForCausalLM", {"attention_bias": False}, "biases of experts and none of attention"),
        ("FalconH1ForCausalLM", {"mamba_norm_before_gate": True}, "a norm before the gate"),
        ("FalconH1ForCausalLM", {"tie_word_embeddings": True}, "one matrix for embedding and head, with multipliers"),
        ("FalconH1ForCausalLM", {"mamba_conv_bias": False}, "convolutions without a bias"),
        ("FalconH1ForCausalLM", {"projectors_bias": True}, "biases of projections"),
        ("Mamba2ForCausalLM", {"expand": 3, "num_heads": 12}, "layers with Mamba of 192 numbers, not twice the 64"),
        ("Mamba2ForCausalLM", {"time_step_limit": [0.3, 1.1]}, "time steps limited to 0.3 to 1.1"),
        ("NemotronHForCausalLM", {"time_step_min": 0.002}, "time steps limited to 0.002 to inf"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*E-"}, "MLPs next to layers with experts"),
        (
            "GraniteMoeHybridForCausalLM",
            HYBRID | {"mamba_expand": 3, "mamba_n_heads": 6},
            "layers with Mamba of 192 numbers, not twice the 64",
        ),
        (
            "GraniteMoeHybridForCausalLM",
            HYBRID | {"position_embedding_type": "rope"},
            "rotary embeddings in other layers than granitehybrid",
        ),
    ],
)
def test_what_llama_cpp_has_otherwise_is_told(architecture: str, changes: dict[str, Any], what: str) -> None:
    raw = in_llama_cpp(architecture)
    assert not list(_without_place(parse_model_config(raw)))
    assert what in [said[: len(what)] for said in _without_place(parse_model_config(raw | changes))]


@pytest.mark.parametrize("architecture", ["FalconH1", "NemotronH"])
def test_mamba_2_in_few_bits_computes_the_same_in_llama_cpp(architecture: str, adapted: Any, tmp_path: Path) -> None:
    adapter, out = adapted(f"{architecture}ForCausalLM"), tmp_path / "out"
    assert merge(adapter, out, "--quantize", "q8_0") == 0
    found, ids = theirs(out)
    assert distance(found, ours(out, ids=ids)) < 0.4 < 0.5 * distance(found, ours(tmp_path / "model", ids=ids))
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out / "model.gguf").tensors}
    assert types["blk.0.ssm_in.weight"] == "Q8_0" and {types[f"blk.0.ssm_{part}"] for part in "ad"} == {"F32"}
    config, files = load_model_config(out), ModelFiles(out)
    files.check(config)
    assert any(files.is_frozen(spec) for spec in weight_specs(config) if spec.name.endswith(".in_proj.weight"))


def test_multipliers_count_once(adapted: Any, tmp_path: Path) -> None:
    """The file's weights have Falcon-H1's multipliers: the config.json next to it has none."""
    assert merge(adapted("FalconH1ForCausalLM"), tmp_path / "out") == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["ssm_multipliers"] == [1.0] * 5
    shutil.copy(tmp_path / "model/config.json", tmp_path / "out")
    with pytest.raises(WgradError, match="whose weights have Falcon-H1's multipliers already.*file by itself"):
        ours(tmp_path / "out")


SAFE = ("--format", "safetensors")
