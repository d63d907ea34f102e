"""The sound files that the fuzzer changes: the smallest model of each architecture, an adapter, data, a run.

Made with the writers of safetensors, gguf and tokenizers, so that no fault of wgrad's can hide in them; only the run
and its adapter come from `wgrad finetune`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import safetensors.numpy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from tests.fuzz.case import Files
from wgrad.device.formats.nf4 import LEVELS

SPECIAL = ["<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>"]
CHAT = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
VOCAB, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = 256 + len(SPECIAL), 32, 64, 2, 1, 16
KINDS = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
}
ROPES: list[dict[str, Any]] = [
    {"rope_theta": 10000.0},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
            "truncate": True,
            "original_max_position_embeddings": 64,
        }
    },
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0}},
]


def model_config(architecture: str = "LlamaForCausalLM", rope: int = 0) -> dict[str, Any]:
    """A whole config.json, with the keys that its architecture looks at."""
    kind = KINDS[architecture]
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": kind,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": kind == "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "dtype": "bfloat16",
    } | ROPES[rope]
    if kind == "mistral":
        config["sliding_window"] = 64
    elif kind.startswith("qwen"):
        config |= {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}
        config["layer_types"] = ["full_attention"]
    elif kind == "smollm3":
        config |= {"no_rope_layers": [1], "no_rope_layer_interval": 4, "use_sliding_window": False}
    return config


def model_weights(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """bfloat16 tensors of the architecture; their values are few, so that a kept file is small."""
    generator, kind = np.random.default_rng(7), config["model_type"]
    q, kv, hidden, ffn = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, HIDDEN, FFN
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCAB, hidden)
    layer = "model.layers.0."
    for name, shape in {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}.items():
        shapes[f"{layer}self_attn.{name}_proj.weight"] = shape
        if kind == "qwen2" and name != "o":
            shapes[f"{layer}self_attn.{name}_proj.bias"] = shape[:1]
    for name, shape in {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}.items():
        shapes[f"{layer}mlp.{name}_proj.weight"] = shape
    for name in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{layer}{name}.weight"] = (hidden,)
    if kind == "qwen3":
        shapes |= {f"{layer}self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
    values = {name: np.round(2 * generator.standard_normal(shape)) / 4 for name, shape in shapes.items()}
    return {n: (np.ones_like(v) if "norm" in n else v).astype(ml_dtypes.bfloat16) for n, v in values.items()}


def quantized_weights(weights: dict[str, np.ndarray], nested: bool) -> dict[str, np.ndarray]:
    """The same checkpoint with its projections as bitsandbytes stores NF4."""
    result, generator = {}, np.random.default_rng(8)
    for name, value in weights.items():
        if "_proj.weight" not in name:
            result[name] = value
            continue
        blocks = -(-value.size // 64)
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(value.shape)}
        result[name] = generator.integers(0, 256, (value.size // 2, 1)).astype(np.uint8)
        result[name + ".quant_map"] = LEVELS
        if nested:
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}
            result[name + ".absmax"] = np.full(blocks, 128, np.uint8)
            result[name + ".nested_absmax"] = np.full(1, 0.25, np.float32)
            result[name + ".nested_quant_map"] = np.linspace(-1, 1, 256).astype(np.float32)
        else:
            result[name + ".absmax"] = np.full(blocks, 0.5, np.float32)
        text = json.dumps(state).encode()
        result[name + ".quant_state.bitsandbytes__nf4"] = np.frombuffer(text, np.uint8)
    return result


def gguf_file(weights: dict[str, np.ndarray], config: dict[str, Any] | None = None) -> bytes:
    """A llama's weights as the gguf package writes them, the matrices in every type that it can quantize to. config:
    written too, and a tokenizer of pieces, so that the file is a whole model."""
    words = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    names = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")
    kinds = [gguf.GGMLQuantizationType[name] for name in names]
    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder) / "model.gguf", "llama")
        writer.add_block_count(1)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        if config is None:
            writer.add_token_list(SPECIAL)
        else:
            _describe_gguf(writer, config)
        for number, (name, value) in enumerate(weights.items()):
            kind = kinds[number % len(kinds) if value.ndim == 2 else 0]
            stored = gguf.quantize(value.astype(np.float32), kind)
            writer.add_tensor(words.get_name(name, (".weight",)), stored, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return (Path(folder) / "model.gguf").read_bytes()


def _describe_gguf(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(64)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_key_length(config.get("head_dim", config["hidden_size"] // HEADS))
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    pieces = sorted(set("\u2581abcdefghijklmnopqrstuvwxyz") | {"\u2581th", "he", "th", "in"})
    tokens = (SPECIAL + pieces + [f"<0x{i:02X}>" for i in range(256)])[: config["vocab_size"]]
    kind = gguf.TokenType
    types = [kind.CONTROL] * len(SPECIAL) + [kind.NORMAL] * len(pieces) + [kind.BYTE] * 256
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types[: len(tokens)])
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    writer.add_add_space_prefix(True)
    writer.add_chat_template(CHAT)


QUANTIZATION = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "llm_int8_skip_modules": ["lm_head"],
}


def tokenizer() -> Tokenizer:
    """Byte level without merges: as many tokens as bytes, and SPECIAL; <s> is put in front."""
    vocab = {text: i for i, text in enumerate(SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    return backend


def dump(value: Any) -> bytes:
    try:
        return json.dumps(value, indent=1, default=lambda octets: octets.decode("latin-1")).encode()
    except (ValueError, RecursionError):  # put into itself
        return b"null"


def model_files(config: dict[str, Any], weights: dict[str, np.ndarray]) -> Files:
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return {
        "model/config.json": dump(config),
        "model/generation_config.json": dump({"eos_token_id": [1, 2], "do_sample": True, "temperature": 0.7}),
        "model/model.safetensors": safetensors.numpy.save(weights, {"format": "pt"}),
        "model/tokenizer.json": tokenizer().to_str().encode(),
        "model/tokenizer_config.json": dump(special | {"chat_template": CHAT, "tokenizer_class": "GPT2Tokenizer"}),
        "model/special_tokens_map.json": dump(special),
    }


PLAIN_LINES: list[dict[str, Any]] = [  # without a conversation: for those a process has to start
    {"text": "still waters run deep"},
    {"prompt": "all that glitters", "completion": " is not gold"},
]
LINES: list[dict[str, Any]] = [
    *PLAIN_LINES,
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "good day"}]},
    {
        "prompt": [{"role": "user", "content": "better late"}],
        "completion": [{"role": "assistant", "content": "than never"}],
    },
    {
        "messages": [
            {"role": "user", "content": "what time"},
            {"role": "assistant", "content": "noon", "thinking": "x"},
        ],
        "tools": [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}],
    },
]

PREFERENCES: list[dict[str, Any]] = [
    {"prompt": "all that glitters", "chosen": " is not gold", "rejected": " is gold"},
    {"chosen": "still waters run deep", "rejected": "still waters run dry"},
    {
        "prompt": [{"role": "user", "content": "hi"}],
        "chosen": [{"role": "assistant", "content": "good day"}],
        "rejected": [{"role": "assistant", "content": "go"}],
    },
    {
        "chosen": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "good day"}],
        "rejected": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "go"}],
    },
]
LABELS: list[dict[str, Any]] = [
    {"prompt": "all that glitters", "completion": " is not gold", "label": True},
    {"prompt": "better late", "completion": " than now", "label": False},
    {
        "prompt": [{"role": "user", "content": "hi"}],
        "completion": [{"role": "assistant", "content": "good day"}],
        "label": True,
    },
]


def jsonl(lines: list[Any]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


RUN_OPTIONS = (
    "--max-length 16 --lora-r 2 --batch-size 1 --gradient-accumulation-steps "
    "1 --save-steps 1 --eval-fraction 0 --device cpu".split()
)
SAMPLING = ["finetune", "--model", "model", "--data", "data.jsonl", "--out", "out", *RUN_OPTIONS]
FINETUNE = [*SAMPLING, "--no-sample"]  # which takes most of a short run
RESUME = ["finetune", "--out", "out", "--resume", "--device", "cpu"]  # whatever its config.yaml says
EXPORT = ["export", "--model", "model", "--gguf-lora", "adapter.gguf"]
MERGE = ["merge", "--model", "model", "--out", "merged", "--device", "cpu"]
GENERATE = ["generate", "--model", "model", "--device", "cpu", "--max-new-tokens", "1", "--prompt"]


def base_groups() -> dict[str, Files]:
    """Groups of files by name; those of a run and its adapter are added by campaign.py, which has them made."""
    groups: dict[str, Files] = {}
    for architecture, kind in KINDS.items():
        config = model_config(architecture)
        groups["model" if kind == "llama" else kind] = model_files(config, model_weights(config))
    for name, nested in (("nf4", False), ("nf4-nested", True)):
        config = model_config() | {"quantization_config": QUANTIZATION}
        groups[name] = model_files(config, quantized_weights(model_weights(model_config()), nested))
    del (rest := dict(groups["model"]))["model/model.safetensors"]
    groups["gguf"] = rest | {"model/model.gguf": gguf_file(model_weights(model_config()))}
    groups["gguf-alone"] = {"model/model.gguf": gguf_file(model_weights(model_config()), model_config())}
    groups["data"], groups["chat"] = {"data.jsonl": jsonl(PLAIN_LINES)}, {"data.jsonl": jsonl(LINES)}
    return groups
