"""Files of models and adapters: they mean the same as for transformers, PEFT and bitsandbytes."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.families.table import FAMILY_ROWS, of_families
from tests.tools import oracle_package
from tests.train.conftest import distance, tiny_config
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.contract import Device
from wgrad.device.errors import WgradError
from wgrad.device.formats.nf4 import NF4Array
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.files.safetensors_files import from_arrays, read_entries, write_safetensors
from wgrad.train.model.adapter_config import adapter_note
from wgrad.train.model.adapter_files import load_adapter, save_adapter
from wgrad.train.model.config_file import UNSUPPORTED
from wgrad.train.model.families import FAMILIES
from wgrad.train.model.inputs import whole_inputs
from wgrad.train.model.load_config import load_model_config, parse_model_config
from wgrad.train.model.load_weights import load_frozen
from wgrad.train.model.lora import LoraConfig, init_lora, linear_modules, lora_shapes
from wgrad.train.model.model import Model
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.model_files import ModelFiles, open_files, use_own_head
from wgrad.train.model.multimodal import MULTIMODAL
from wgrad.train.model.rope_scaling import inverse_frequencies
from wgrad.train.model.weights import EMBEDDING, HEAD
from wgrad.train.step.build import build_frozen

torch = oracle_package("torch")
transformers = oracle_package("transformers")
peft = oracle_package("peft")
safetensors_torch = oracle_package("safetensors.torch")

pytestmark = pytest.mark.oracle

Values = Callable[[Any, Any], np.ndarray]
TOKENS = 24


def random_ids() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 300, TOKENS).astype(np.int32)


def our_logits(model: Model, ids: np.ndarray) -> np.ndarray:
    device, row = model.device, np.arange(len(ids), dtype=np.int32)[None]
    inputs = whole_inputs(model, ids[None], row, np.zeros_like(row))
    return device.download(model.logits(model.hidden(inputs).data))


def their_logits(model: Any, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(ids[None].astype(np.int64)), use_cache=False).logits[0].double().numpy()


def their_model(folder: Path, dtype: Any = None) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or torch.float32)


# ---- config.json -------------------------------------------------------------------------------
KEYS = {
    "vocab_size": 300, "hidden_size": 128, "intermediate_size": 88, "num_hidden_layers": 6, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 12, "hidden_act": "silu", "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "layer_norm_eps": 1e-4, "norm_epsilon": 1e-3, "use_bias": False, "rope_theta": 12345.0,
    "rope_scaling": None, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True,
    "use_sliding_window": True, "sliding_window": 17, "max_window_layers": 2, "layer_types": None,
    "no_rope_layers": None, "no_rope_layer_interval": 3, "state_size": 100,
}  # fmt: skip
# Keys that mean the same in several ways: changes of the tiny model.
WAYS = of_families(lambda row: row.reading.ways)
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def base_config(architecture: str) -> dict[str, Any]:
    reading = FAMILY_ROWS[architecture].reading
    named = {"architectures": [architecture], "model_type": FAMILIES[architecture].model_type}
    ids = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": None}
    found = {**named, **KEYS, **ids, **reading.given}
    return {key: value for key, value in found.items() if key not in reading.lacks}


def _biased(theirs: Any, key: str | bool) -> bool:
    """Return whether a key asks for biases, if the family's class declares it."""
    if isinstance(key, bool):
        return key
    return any(field.name == key for field in dataclasses.fields(theirs)) and bool(getattr(theirs, key))


def _rotates(theirs: Any) -> list[bool]:
    """Return for each layer whether it has rotary embeddings."""
    return [bool(r) for r in getattr(theirs, "no_rope_layers", None) or [1] * theirs.num_hidden_layers]


def _windows(theirs: Any) -> list[int]:
    """Return the width of each layer's window, or 0."""
    types, window = getattr(theirs, "layer_types", None), getattr(theirs, "sliding_window", None) or 0
    return [window if types and types[i] == "sliding_attention" else 0 for i in range(theirs.num_hidden_layers)]


def _inverse(theirs: Any, rope: dict[str, Any], head_dim: int) -> list[float]:
    if "rope_type" in rope and rope["rope_type"] != "default" and rope is theirs.rope_parameters:
        found = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, "cpu")[0].tolist()
    elif rope.get("rope_type") == "proportional":
        turned = int(head_dim * rope["partial_rotary_factor"] // 2)
        found = [rope["rope_theta"] ** (-2 * i / head_dim) * (i < turned) for i in range(head_dim // 2)]
    else:
        rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        found = (1.0 / rope["rope_theta"] ** (np.arange(0, rotated, 2) / rotated)).astype(np.float32).tolist()
    return found


def as_theirs(raw: dict[str, Any]) -> dict[str, Any]:
    """Read a config.json by transformers, in terms of ModelConfig. Raises the errors of its classes."""
    theirs = transformers.CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw))
    reading = FAMILY_ROWS[raw["architectures"][0]].reading
    reading.prepare(theirs)
    layers, heads = theirs.num_hidden_layers, theirs.num_attention_heads
    latent = getattr(theirs, "qk_rope_head_dim", None)
    if reading.head_dims is None:
        full_dim = head_dim = latent or getattr(theirs, "head_dim", None) or theirs.hidden_size // heads
    else:
        full_dim, head_dim = reading.head_dims(theirs)
    rope = getattr(theirs, "rope_parameters", None) or {"rope_theta": raw.get("rope_theta", 1e4)}  # Nemotron-H has none
    full, local = (rope[kind] if kind in rope else rope for kind in ("full_attention", "sliding_attention"))
    return {
        "vocab_size": theirs.vocab_size,
        "hidden_size": theirs.hidden_size,
        "intermediate_size": np.max(getattr(theirs, reading.mlp_width)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(theirs, "num_kv_heads", getattr(theirs, "num_key_value_heads", 0)) or heads,
        "head_dim": getattr(theirs, "qk_head_dim", head_dim),
        "rms_norm_eps": reading.epsilon
        if isinstance(reading.epsilon, float)
        else getattr(theirs, reading.epsilon) or theirs.layer_norm_eps,
        "max_position_embeddings": theirs.max_position_embeddings,
        "tie_word_embeddings": theirs.tie_word_embeddings,
        "windows": tuple((reading.windows or _windows)(theirs)),
        "use_rope": tuple((reading.rotates or _rotates)(theirs)),
        "o_bias": _biased(theirs, reading.o_bias),
        "mlp_bias": _biased(theirs, reading.mlp_bias),
        "inverse": [_inverse(theirs, *given) for given in ((full, full_dim), (local, head_dim))],
    }


@pytest.mark.parametrize("positions", [64, 65, 200])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_tables_that_depend_on_the_longest_sequence_equal_those_of_transformers(kind: str, positions: int) -> None:
    scaling = {"rope_type": kind, "factor": 3.0, "short_factor": [1.5, 2.0, 2.5], "long_factor": [3.0, 5.0, 7.0]}
    raw = base_config("LlamaForCausalLM") | {"head_dim": 6, "max_position_embeddings": 64, "rope_scaling": scaling}
    theirs = transformers.LlamaConfig(**raw | {"rope_scaling": {**scaling, "original_max_position_embeddings": 64}})
    inverse, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](theirs, "cpu", seq_len=positions)
    ours = parse_model_config(raw).rope
    np.testing.assert_allclose(inverse_frequencies(ours, positions), inverse.numpy(), rtol=3e-7)
    assert ours.attention_factor == pytest.approx(factor, rel=1e-12)
    assert (positions == 64) == np.array_equal(inverse_frequencies(ours, positions), inverse_frequencies(ours, 64))


@pytest.mark.parametrize(("kind", "high"), [("default", 4.0), ("llama3", 4.0), ("llama3", 1.0), ("yarn", 4.0)])
def test_frequencies_are_those_of_transformers_to_the_last_bit(kind: str, high: float) -> None:
    """With PyTorch's powers all are equal, with others 49 of 50. At position 32,768, one bit is 0.002 rad."""
    more = {"factor": 5.5, "original_max_position_embeddings": 5000, "low_freq_factor": 1.0, "high_freq_factor": high}
    found, wanted = [], []
    for width in (32, 80, 96, 128):
        for theta in (1e4, 10_000.0004, 5e5, 1e6):  # one that float32 has not
            scaling = {"rope_type": kind, "rope_theta": theta, **({} if kind == "default" else more)}
            raw = base_config("LlamaForCausalLM") | {"head_dim": width, "max_position_embeddings": 22528}
            theirs = transformers.LlamaConfig(**raw, rope_parameters=scaling)
            wanted.append(transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs).inv_freq.numpy())
            raw |= {"rope_theta": theta, "rope_scaling": None if kind == "default" else scaling}
            ours = parse_model_config(raw).rope
            found.append(inverse_frequencies(ours))
            powers = theta ** (torch.arange(0, width, 2).float() / width)
            with patch.object(np, "power", return_value=powers.double().numpy()):
                np.testing.assert_array_equal(inverse_frequencies(ours), wanted[-1])
    assert np.mean(np.concatenate(found) != np.concatenate(wanted)) <= 0.02


def as_ours(config: ModelConfig) -> dict[str, Any]:
    same = [
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings", "windows", "use_rope",
        "o_bias", "mlp_bias",
    ]  # fmt: skip
    ropes = (config.rope, config.local_rope or config.rope)
    return {n: getattr(config, n) for n in same} | {"inverse": [inverse_frequencies(r).tolist() for r in ropes]}


# Keys of transformers' classes that change nothing of a model which is read without experts and without dropout.
HARMLESS = re.compile(
    r"\w+_token_id|\w*dropout|\w+_pdrop|initializer_range|use_cache|pretraining_tp|mamba_chunk_size|num_logits_to_keep"
    r"|is_decoder|init_std|summary_\w+|linear_(a_log|dt)_\w+|num_experts_per_tok|output_router_logits|router_aux_loss_coef|top_k_experts"
    r"|moe_intermediate_size|embedding_initializer_range|mtp_(mlp_)?layer_types|enable_moe_fp32_combine"
)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_key_of_transformers_is_read_or_refused(architecture: str) -> None:
    family = FAMILIES[architecture]
    names = {field.name for field in dataclasses.fields(transformers.CONFIG_MAPPING[family.model_type])}
    names -= {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    names -= {*family.keys.__struct_fields__, *UNSUPPORTED, *family.keys.unsupported, *family.keys.dropouts}
    not_read = FAMILY_ROWS[architecture].reading.not_read
    assert [name for name in names if not (HARMLESS.fullmatch(name) or re.fullmatch(not_read, name))] == []


def test_contradictory_numbers_of_experts_are_read_as_in_transformers() -> None:
    """Or refused by the key. A file may have the name of another family's key."""
    compared, different = 0, []
    for architecture, family in FAMILIES.items():
        kind = transformers.CONFIG_MAPPING[family.model_type]
        field = next((key for key in EXPERT_COUNTS if key in kind.__dataclass_fields__), "")
        base = {key: value for key, value in base_config(architecture).items() if key not in EXPERT_COUNTS}
        for pair in itertools.permutations(EXPERT_COUNTS, 2) if field else ():
            raw = base | dict(zip(pair, (16, 32), strict=True))
            try:
                experts = parse_model_config(raw).experts
            except WgradError as problem:
                assert any(key in str(problem) for key in pair), (pair, str(problem))
                continue
            if experts is not None:
                compared += 1
                wanted = getattr(kind.from_dict(dict(raw)), field)
                different += [] if experts.count == wanted else [(architecture, pair, experts.count, wanted)]
    assert different == []
    assert compared > 80


def test_other_names_of_keys_are_read_as_in_transformers() -> None:
    compared = 0
    for architecture, family in FAMILIES.items():
        for other, key in transformers.CONFIG_MAPPING[family.model_type].attribute_map.items():
            raw = tiny_config(architecture)
            if type(value := raw.pop(key, None)) is int:
                wanted = parse_model_config(raw | {key: value})
                assert parse_model_config(raw | {other: value}) == wanted, (architecture, other)
                compared += 1
    assert compared > 15


@pytest.mark.parametrize("architecture", MULTIMODAL)
def test_a_text_config_without_keys_has_the_defaults_of_transformers(architecture: str) -> None:
    whole = MULTIMODAL[architecture]
    kind, thinker = next(iter(whole.texts)), "thinker_config" in whole.text_keys[0]
    hybrid = "hybrid_override_pattern" in FAMILIES[whole.texts[kind]].keys.__struct_fields__
    own: dict[str, Any] = {} if hybrid else {"head_dim": 64}  # that of Omni models, by default, is odd
    own |= {"num_experts_per_tok": 6, "mlp_layer_types": ["sparse"] * 32} if kind == "deepseek_ocr2_text" else {}

    def parsed(text: dict[str, Any]) -> Any:
        raw = {"text_config": text | own}
        inside = {"thinker_config": raw} if thinker else raw
        config = parse_model_config({"architectures": [architecture], "model_type": whole.model_type, **inside})
        return replace(config, score_scale=config.score_scale or config.head_dim**-0.5)

    outer = transformers.CONFIG_MAPPING[f"{whole.model_type}_thinker" if thinker else whole.model_type]
    adaptor = {"adaptor_config": {"hidden_size": 4096, "intermediate_size": 1024}}  # which must fit, if there is one
    full = outer.from_dict({"text_config": {"model_type": kind, **own}, **adaptor}).get_text_config()
    assert parsed({"model_type": kind}) == parsed(json.loads(full.to_json_string(use_diff=False)))


def test_quantization_is_named_next_to_the_thinker_of_an_omni_model() -> None:
    text = {**tiny_config("Qwen2ForCausalLM"), "model_type": "qwen2_5_omni_text"}
    raw = {"architectures": ["Qwen2_5OmniForConditionalGeneration"], "thinker_config": {"text_config": text}}
    quantized = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    assert parse_model_config(raw).quantization is None
    assert parse_model_config(raw | {"quantization_config": quantized}).quantization is not None


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_dropouts_that_transformers_applies_are_known(architecture: str) -> None:
    """A run says that they are not applied: the keys that the modules read, with the defaults of the class."""
    family = FAMILIES[architecture]
    kind = transformers.CONFIG_MAPPING[family.model_type]
    path = Path(inspect.getfile(kind))
    path = path.with_name(path.name.replace("configuration_", "modeling_"))
    text = path.read_text(encoding="utf-8") if path.exists() else ""  # two are there as configurations alone
    read = set(re.findall(r"config\.(\w*dropout|\w+_pdrop)\b", text)) - {"classifier_dropout", "summary_first_dropout"}
    of_text = {field.name: field.default for field in dataclasses.fields(kind) if field.name in read}
    assert of_text.items() <= family.keys.dropouts.items()


@pytest.mark.parametrize("how", ["as it is", "missing", "null"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_each_key_missing_or_null_is_as_in_transformers(architecture: str, how: str) -> None:
    """If transformers refuses a file, so do we; otherwise the model is the same."""
    read, refused, reading = 0, 0, FAMILY_ROWS[architecture].reading
    for key in KEYS if how != "as it is" else ["vocab_size"]:
        raw = base_config(architecture)
        if key not in raw:
            continue
        if how == "missing":
            del raw[key]
        elif how == "null":
            raw[key] = None
        if key == "rope_theta" and how == "null":  # transformers keeps the null, and fails when the model is made
            without = {name: value for name, value in raw.items() if name != key}
            assert parse_model_config(raw).rope.theta == parse_model_config(without).rope.theta
            continue
        try:
            theirs = as_theirs(raw)
        except Exception as error:
            if isinstance(error, ZeroDivisionError):  # of EXAONE 4 without a window, which has a pattern of 0 then
                assert key in reading.divides_by_zero
                continue
            if isinstance(error, TypeError):  # of dots.llm1
                assert key == "max_window_layers"
            else:
                assert "Strict" in type(error).__name__, (key, error)
            # Llama's class wants hidden_size / num_attention_heads whole even where head_dim is given; we need not.
            if "not a multiple of the number of attention" not in str(error):
                with pytest.raises(WgradError, match=rf"^config.json: .*({key}|layer_types).* must "):
                    parse_model_config(raw)
            refused += 1
            continue
        fails = (*reading.fails, *(reading.fails_of_null if how == "null" else ()))
        if theirs["num_attention_heads"] % theirs["num_key_value_heads"] or key in fails:
            with pytest.raises(WgradError, match="must be"):
                parse_model_config(raw)
            continue
        ours = as_ours(parse_model_config(raw))
        inverse = theirs.pop("inverse")
        for found, wanted in zip(ours.pop("inverse"), inverse, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-6, err_msg=key)
        assert ours == theirs, key
        read += 1
    assert read >= {"null": reading.read_nulls, "as it is": 1}.get(how, 5)
    assert refused >= (reading.refused_nulls if how == "null" else 0)  # most keys are optional, or not there


@pytest.mark.parametrize(("architecture", "changes"), WAYS)
def test_what_a_config_says_in_several_ways_is_as_in_transformers(
    architecture: str, changes: dict[str, Any], make_checkpoint: Any
) -> None:
    given = {"rope_theta": None} if "rope_parameters" in changes else {}
    folder = make_checkpoint(architecture, **{"num_hidden_layers": 3, "sliding_window": 5, **given, **changes})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k != "rope_theta" or v}))
    config, ids = load_model_config(folder), random_ids()
    ours = our_logits(build_frozen(config, folder, ReferenceDevice(), positions=TOKENS, quantize=False), ids)
    assert distance(ours, their_logits(their_model(folder), ids)) < 2e-5


def test_a_sliding_window_without_its_width_has_4096(make_checkpoint: Any) -> None:
    for architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        folder = make_checkpoint(architecture, name=architecture, use_sliding_window=True, max_window_layers=1)
        assert load_model_config(folder).windows == (0, 4096)


# ---- weights -----------------------------------------------------------------------------------
def change(folder: Path, **changes: Any) -> None:
    """Change tensors of a checkpoint in one file; None drops a tensor."""
    arrays: dict[str, Any] = {n: e.array() for n, e in ModelFiles(folder).entries.items()}
    arrays |= {name.replace("__", "."): value for name, value in changes.items()}
    kept = {name: value for name, value in arrays.items() if value is not None}
    write_safetensors(folder / "model.safetensors", from_arrays(kept))


def tie(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))


@pytest.mark.parametrize("case", ["other head", "same head", "no head", "no embedding"])
def test_a_head_other_than_the_tied_embedding_is_used(case: str, make_checkpoint: Any) -> None:
    folder = make_checkpoint("LlamaForCausalLM")
    tie(folder)
    embedding = ModelFiles(folder).entries[EMBEDDING].array()
    if case == "same head":
        change(folder, **{HEAD: embedding})
    elif case == "no head":
        change(folder, **{HEAD: None})
    elif case == "no embedding":
        change(folder, **{EMBEDDING: None})
    device, config = ReferenceDevice(), load_model_config(folder)
    config, note = use_own_head(config, ModelFiles(folder))
    assert ("it is used" in note) == (case == "other head") == (not config.tie_word_embeddings)
    theirs = their_model(folder)
    plain, true = their_logits(theirs, random_ids()), their_logits(theirs.double(), random_ids())
    ours = our_logits(build_frozen(config, folder, device, positions=64, quantize=False), random_ids())
    assert distance(ours, true) <= 2 * distance(plain, true)
    if case == "other head":
        with pytest.raises(ValueError, match="use_own_head"):
            load_frozen(folder, load_model_config(folder), device)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_checkpoint_that_bitsandbytes_quantized_has_its_values(
    dtype: str, double: bool, make_checkpoint: Any, tmp_path: Path, nf4_values: Values, device: Device
) -> None:
    """transformers leaves some modules in float. Decoded values are rounded to the dtype of the original weights.

    The oracle is bitsandbytes' `dequantize`. (Its float32 layers use these values in the backward only, and unrounded
    ones in the forward; its 16-bit layers use these in both.) Rows are whole blocks, for which bitsandbytes is right on
    every CPU, as the test checks first with its formula.
    """
    pytest.importorskip("bitsandbytes", reason="the oracle is bitsandbytes: pip install wgrad[oracle]")
    skipped = [
        "lm_head",
        "model.layers.0.self_attn.k_proj",
        "layers.1.mlp.down_proj",
        "model.layers.1.self_attn.o_proj",
    ]
    folder = make_checkpoint(hidden_size=64, intermediate_size=128, head_dim=16, dtype=dtype, num_hidden_layers=3)
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        llm_int8_skip_modules=skipped,
    )
    load = transformers.AutoModelForCausalLM.from_pretrained
    load(folder, dtype=getattr(torch, dtype), quantization_config=settings).save_pretrained(tmp_path / "nf4")
    theirs = load(tmp_path / "nf4", dtype=getattr(torch, dtype))
    layers = {n: m.weight for n, m in theirs.named_modules() if type(m).__name__ == "Linear4bit"}
    assert len(layers) == 3 * 7 - 3
    values = {n: torch.tensor(nf4_values(w.data, w.quant_state)) for n, w in layers.items()}
    theirs = theirs.dequantize().float()

    config = load_model_config(tmp_path / "nf4")
    weights = load_frozen(tmp_path / "nf4", config, device)
    assert {n for n, w in weights.items() if isinstance(w, NF4Array)} == {f"{n}.weight" for n in layers}
    for name, value in values.items():
        rounded = value.to(getattr(torch, dtype)).float()
        assert torch.equal(theirs.get_submodule(name).weight, rounded)
        assert (dtype == "float32") == torch.equal(rounded, value)
        np.testing.assert_array_equal(device.download(device.dequantize(weights[f"{name}.weight"])), rounded)
    plain, true = their_logits(theirs, random_ids()), their_logits(theirs.double(), random_ids())
    assert distance(our_logits(Model(config, weights, device, positions=64), random_ids()), true) <= 2 * distance(
        plain, true
    )


def write_fp8(folder: Path, block: tuple[int, int] | None, dtype: str = "float32") -> None:
    """Convert a checkpoint's projections to FP8, with scales of blocks, or one of the weight and one of inputs."""
    arrays: dict[str, Any] = {}
    values = {n: torch.tensor(np.float32(e.array())) for n, e in read_entries(folder / "model.safetensors", "").items()}
    for name, value in dict(values).items():
        if value.ndim == 3:  # each expert by itself, as published files have them
            halves = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            for number, of_one in enumerate(values.pop(name)):
                for half, part in zip(halves, of_one.chunk(len(halves))):
                    values[f"{name.rpartition('.')[0]}.{number}.{half}.weight"] = part
    for name, value in values.items():
        if "_proj" not in name or value.ndim < 2:
            arrays[name] = value.bfloat16() if "correction" not in name else value
            continue
        size = block or tuple(value.shape)
        places = [torch.arange(n) // b for n, b in zip(value.shape, size)]
        random = torch.rand([int(place[-1]) + 1 for place in places], generator=torch.Generator().manual_seed(1))
        scales = torch.exp2(-5 - 3 * random).to(getattr(torch, dtype))
        own = scales.float()[places[0]][:, places[1]]
        arrays[name] = (value / own).clamp(-448, 448).to(torch.float8_e4m3fn)
        arrays[f"{name}_scale_inv"] = scales if block else scales.reshape(())
        if block is None:
            arrays[name.replace("weight", "activation_scale")] = torch.tensor(0.1)
    safetensors_torch.save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    scheme = {
        "quant_method": "fp8",
        "fmt": "e4m3" if block else "float8_e4m3fn",
        "activation_scheme": "dynamic" if block else "static",
    }
    raw = json.loads(path.read_text()) | {"dtype": "bfloat16", "quantization_config": scheme}
    raw["quantization_config"] |= {"weight_block_size": block, "modules_to_not_convert": ["lm_head"]}
    path.write_text(json.dumps(raw))


FP8: dict[str, tuple[str, tuple[int, int] | None, str]] = {  # by its name: torch is not imported by all that collect
    "blocks": ("LlamaForCausalLM", (8, 4), "float32"),
    "a whole tensor": ("Ministral3ForCausalLM", None, "bfloat16"),
    "experts": ("DeepseekV3ForCausalLM", (2, 2), "float32"),
}


@pytest.mark.parametrize("kind", FP8)
def test_weights_in_fp8_are_read_as_in_transformers(kind: str, make_checkpoint: Any, tmp_path: Path) -> None:
    architecture, block, dtype = FP8[kind]
    folder = make_checkpoint(architecture)
    write_fp8(folder, block, dtype)
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(folder, dtype=torch.bfloat16, experts_implementation="eager").float()
    plain, true = their_logits(theirs, random_ids()), their_logits(theirs.double(), random_ids())
    config = load_model_config(folder)
    model = build_frozen(config, folder, ReferenceDevice(), positions=64, quantize=False)
    assert {str(w.dtype) for n, w in model.weights.items() if "_proj" in n} == {"bfloat16"}
    assert distance(our_logits(model, random_ids()), true) <= 2 * distance(plain, true)
    quantized = build_frozen(config, folder, ReferenceDevice(), positions=64)
    assert isinstance(quantized.weights["model.layers.1.self_attn.o_proj.weight"], NF4Array)


def test_all_experts_of_a_layer_in_fp8_have_a_scale_each(make_checkpoint: Any) -> None:
    """As Mistral Small 4's, or one for gate and one for up. transformers reads them on a GPU alone."""
    folder = make_checkpoint("Mistral4ForCausalLM")
    write_fp8(folder, None)
    parts = safetensors_torch.load_file(folder / "model.safetensors")
    of_one = {name: value for name, value in parts.items() if ".mlp.experts." in name}
    owner = "model.layers.1.mlp.experts."
    rest = {name: value for name, value in parts.items() if name not in of_one}
    codes = {
        f"{owner}{name}": torch.arange(6 * rows * width, dtype=torch.uint8).reshape(6, rows, width) % 120
        for name, rows, width in (("gate_up_proj", 72, 48), ("down_proj", 48, 36))
    }
    codes = {name: value.view(torch.float8_e4m3fn) for name, value in codes.items()}
    up = f"{owner}gate_up_proj"
    for shape in ((6,), (6, 1, 1), (6, 2, 1), (), (5,)):
        scales = torch.exp2(torch.linspace(-9, -3, max(math.prod(shape), 1))).reshape(shape)
        own = {f"{up}_scale_inv": scales, f"{owner}down_proj_scale_inv": torch.ones(6)}
        inputs = {f"{name}_activation_scale": torch.ones(6) for name in codes}
        safetensors_torch.save_file(rest | codes | own | inputs, folder / "model.safetensors", {"format": "pt"})
        if shape == (5,):
            with pytest.raises(WgradError, match=r"up_proj_scale_inv in .* is F32 \[5\]: without weight_block_size"):
                open_files(folder, load_model_config(folder))
            continue
        files = open_files(folder, load_model_config(folder))[0]
        halves = 2 if shape == (6, 2, 1) else 1
        of_rows = scales.reshape(-1, halves, 1).repeat_interleave(72 // halves, 1)
        wanted = (codes[up].float() * of_rows).bfloat16().float().numpy()
        np.testing.assert_array_equal(np.float32(files.entry(up).array()), wanted)
        blocks = np.concatenate([np.float32(block) for block in files.entry(up).blocks(2)])
        np.testing.assert_array_equal(blocks.reshape(wanted.shape), wanted)


def test_blocks_of_fp8_may_go_beyond_a_weight(make_checkpoint: Any) -> None:
    """DeepSeek-V3's kv_a_proj_with_mqa has such blocks, which transformers does not read."""
    name = "model.layers.0.mlp.up_proj.weight"  # [88, 48]
    for number, (block, kind) in enumerate((((128, 128), "float32"), ((20, 32), "float8_e8m0fnu"))):
        folder = make_checkpoint(name=f"fp8 {number}")
        write_fp8(folder, block, kind)
        parts = safetensors_torch.load_file(folder / "model.safetensors")
        codes, scales = parts[name].float(), parts[f"{name}_scale_inv"].float()
        rows, columns = (np.arange(n) // b for n, b in zip(codes.shape, block))
        wanted = (codes * scales[rows][:, columns]).bfloat16().float().numpy()
        files = open_files(folder, load_model_config(folder))[0]
        np.testing.assert_array_equal(np.float32(files.entry(name).array()), wanted)
        assert len(np.unique(scales)) > number
        first = files.digest()
        codes_of = {n: t.clone() for n, t in parts.items()}
        codes_of[name][0, 0] = 1.5
        safetensors_torch.save_file(codes_of, folder / "model.safetensors", {"format": "pt"})
        assert open_files(folder, load_model_config(folder))[0].digest() != first
        del codes_of[f"{name}_scale_inv"]
        safetensors_torch.save_file(codes_of, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(
            WgradError, match=r"^--model: .* has model.layers.0.mlp.up_proj.weight in FP8, and no scale"
        ):
            open_files(folder, load_model_config(folder))
    wrong = dataclasses.replace(load_model_config(folder), fp8_block=(16, 32))
    with pytest.raises(WgradError, match=r"_scale_inv in .* is F8_E8M0 \[\d, \d\]: weight_block_size .* asks for"):
        open_files(folder, wrong)
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"]["fmt"] = "e5m2"
    with pytest.raises(WgradError, match="fmt 'e5m2' is not supported: only e4m3 is"):
        parse_model_config(raw)


# ---- tokenizer and adapter ---------------------------------------------------------------------
@pytest.mark.parametrize("ids", [7, [7, 9]])
def test_the_end_of_a_text_without_generation_config(ids: Any, make_checkpoint: Any) -> None:
    folder = make_checkpoint("LlamaForCausalLM", eos_token_id=ids)
    wanted = their_model(folder).generation_config.eos_token_id
    assert wanted == ids
    assert load_tokenizer(folder).stop_ids >= set(np.atleast_1d(ids).tolist())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 11}))
    assert their_model(folder).generation_config.eos_token_id == 11
    stop = load_tokenizer(folder).stop_ids
    assert 11 in stop and not stop & {7, 9}


@pytest.mark.parametrize("alpha", [None, 0, 3, -2])
@pytest.mark.parametrize("rslora", [False, True])
def test_an_absent_or_zero_lora_alpha_means_what_it_does_in_peft(
    alpha: Any, rslora: bool, make_checkpoint: Any, tmp_path: Path
) -> None:
    folder = make_checkpoint("LlamaForCausalLM")
    config, device = load_model_config(folder), ReferenceDevice()
    lora = LoraConfig(r=5, alpha=9.0, rslora=rslora, target_modules=("q_proj", "down_proj"))
    generator = np.random.default_rng(5)
    shapes = init_lora(lora_shapes(lora, linear_modules(config)), 0)
    values = {n: (0.3 * generator.standard_normal(v.shape)).astype(np.float32) for n, v in shapes.items()}
    save_adapter(tmp_path / "a", lora, values, str(folder))
    path = tmp_path / "a" / "adapter_config.json"
    raw = json.loads(path.read_text())
    del raw["lora_alpha"]
    path.write_text(json.dumps(raw if alpha is None else raw | {"lora_alpha": alpha}))
    read, _ = load_adapter(tmp_path / "a", linear_modules(config))
    assert read.alpha == (8 if alpha is None else alpha)
    assert ("its scale is 0" in adapter_note(read)) == (alpha == 0)
    theirs = peft.PeftModel.from_pretrained(their_model(folder), tmp_path / "a")
    plain, true = their_logits(theirs, random_ids()), their_logits(theirs.double(), random_ids())
    ours = build_frozen(config, folder, device, positions=64, adapter=str(tmp_path / "a"), quantize=False)
    assert distance(our_logits(ours, random_ids()), true) <= 2 * distance(plain, true)
    base = distance(their_logits(their_model(folder, torch.float64), random_ids()), true)
    assert base < 1e-12 if alpha == 0 else base > 0.01
