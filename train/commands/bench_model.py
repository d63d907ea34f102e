"""Models of known shapes with random weights, and their QLoRA steps: for timings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from wgrad.device.contract import Device
from wgrad.device.dry_run import DryRuntime
from wgrad.device.formats.mxfp4 import Mxfp4Array
from wgrad.device.formats.nf4 import NF4Array
from wgrad.train.data.packing import Batch, Step
from wgrad.train.model.load_config import parse_model_config
from wgrad.train.model.load_weights import read_from_main_memory
from wgrad.train.model.lora import Adapter, expert_modules, init_lora, linear_modules, lora_shapes
from wgrad.train.model.model import Model
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.stacks import stack_adapter, stack_if_last
from wgrad.train.model.weights import WeightSpec, weight_specs
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.step.activations import activation_options, scratch_bytes
from wgrad.train.step.build import lora_parameters
from wgrad.train.step.lora_options import lora_config
from wgrad.train.step.optim import AdamW, FlatParameters
from wgrad.train.step.trainer import Trainer


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, and whether its layers are recomputed.

    Attributes:
        others: Further keys of config.json, for families other than Llama.
        mxfp4_experts: Whether experts are MXFP4 and other projections 16 bits; else all are NF4.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    checkpointing: bool
    others: Mapping[str, Any] = field(default_factory=dict)
    mxfp4_experts: bool = False

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "hidden_act": "silu",
            "max_position_embeddings": 8192,
            **self.others,
        }


_QWEN35 = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
_DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
}
_OLMOE = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
}
SHAPES = {
    "smollm2-135m": Shape(576, 1536, 30, 9, 3, 64, 49152, True, False),
    "smollm2-360m": Shape(960, 2560, 32, 15, 5, 64, 49152, True, False),
    "llama-3.2-1b": Shape(2048, 8192, 16, 32, 8, 64, 128256, True, True),
    "llama-3.1-8b": Shape(4096, 14336, 32, 32, 8, 128, 128256, False, True),
    "llama-3.1-70b": Shape(8192, 28672, 80, 64, 8, 128, 128256, False, True),
    "qwen3.5-4b": Shape(2560, 9216, 32, 16, 4, 256, 248320, True, True, _QWEN35),
    "qwen3-30b-a3b": Shape(2048, 6144, 48, 32, 4, 128, 151936, False, True, _QWEN3_MOE),
    "deepseek-v2-lite": Shape(2048, 10944, 27, 16, 16, 64, 102400, False, True, _DEEPSEEK_V2_LITE),
    "olmoe-1b-7b": Shape(2048, 1024, 16, 16, 16, 128, 50304, False, True, _OLMOE),
    "gpt-oss-20b": Shape(2880, 2880, 24, 64, 8, 64, 201088, False, True, _GPT_OSS, mxfp4_experts=True),
    "tinyllama-1.1b": Shape(2048, 5632, 22, 32, 4, 64, 32000, False, False),
    "tiny": Shape(64, 96, 2, 4, 2, 16, 256, True, True),
}


class RandomWeights:
    """Weights of the right kinds and sizes. A block of random numbers is repeated, so some heads have equal queries and
    keys."""

    def __init__(self, device: Device, mxfp4_experts: bool = False) -> None:
        self.mxfp4_experts = mxfp4_experts
        rng = np.random.default_rng(0)
        self.codes = rng.integers(0, 256, 1 << 20).astype(np.uint8)
        self.normal = (0.02 * rng.standard_normal(1 << 20)).astype(ml_dtypes.bfloat16)
        self.device = device
        self.code_map = device.upload(np.linspace(-1, 1, 256).astype(np.float32))

    def make(self, spec: WeightSpec, apart: bool = False) -> Any:
        """Return a weight. apart: it is a table that stays in main memory."""
        device, size = self.device, int(np.prod(spec.shape))
        if spec.kind in ("norm", "bias"):
            return device.upload(np.ones(spec.shape, np.float32))
        if not spec.is_linear:
            table = device.empty_host(spec.shape, self.normal.dtype) if apart else None
            if table is None:
                return device.upload(self.table(spec))
            device.write(table, self.table(spec))
            return table
        rows = (size // spec.shape[-1], spec.shape[-1])
        if self.mxfp4_experts and spec.kind == "experts":
            exponents = self.repeat(120 + self.codes % 2, size // 32)
            return Mxfp4Array(device.upload(self.repeat(self.codes, size // 2)), device.upload(exponents), rows)
        if self.mxfp4_experts:
            return device.upload(self.table(spec))
        blocks = size // 64
        return NF4Array(
            packed=device.upload(self.repeat(self.codes, size // 2)),
            absmax=device.upload(self.repeat(self.codes, blocks)),
            shape=rows,
            nested_absmax=device.upload(np.full(-(-blocks // 256), 0.01, np.float32)),
            nested_code=self.code_map,
            nested_offset=device.upload(np.array([0.04], np.float32)),
        )

    def table(self, spec: WeightSpec) -> np.ndarray:
        """Return the values of an embedding or a head."""
        return self.repeat(self.normal, spec.shape)

    def repeat(self, values: np.ndarray, shape: int | tuple[int, ...]) -> np.ndarray:
        return np.resize(values, shape)


class UnwrittenWeights(RandomWeights):
    """Weights for a dry run, which does not read their values."""

    def repeat(self, values: np.ndarray, shape: int | tuple[int, ...]) -> np.ndarray:
        return np.broadcast_to(values[:1], shape)


def random_weights(config: ModelConfig, device: Device, mxfp4_experts: bool = False) -> dict[str, Any]:
    source = (UnwrittenWeights if isinstance(device, DryRuntime) else RandomWeights)(device, mxfp4_experts)
    weights: dict[str, Any] = {}
    for spec in weight_specs(config):
        weights[spec.name] = source.make(spec, read_from_main_memory(spec, config, device))
        if device.stacks_weights:
            stack_if_last(weights, spec.name, device)
    return weights


def build(
    shape: Shape,
    seq_len: int,
    device: Device,
    compute: Any,
    make_weights: Callable[[ModelConfig, Any, bool], Mapping[str, Any]] = random_weights,
    *,
    offload: bool | int = False,
    keep_attention: bool = False,
    batch: int = 1,
    memory_limit: str | None = None,
    mode: Mapping[str, Any] | None = None,
) -> tuple[Trainer, FlatParameters]:
    """Build a trainer of a model with random weights, and LoRA on all projections except those of experts.

    memory_limit: only for the choices that depend on it; the device is not limited. mode: further options, such as
    `target_modules` that name experts.
    """
    config = parse_model_config(shape.config())
    options = RunOptions(
        batch_size=batch, gradient_accumulation_steps=1, max_length=seq_len, logging_steps=100, compute=compute,
        gradient_checkpointing=shape.checkpointing, offload_activations=offload, keep_attention=keep_attention or None,
        memory_limit=memory_limit,
    )  # fmt: skip
    options = replace(options, **(mode or {}))
    weights = make_weights(config, device, shape.mxfp4_experts)
    lora = lora_config(options, config)
    values = init_lora(lora_shapes(lora, linear_modules(config), experts=expert_modules(config)), 0)
    parameters = lora_parameters(values, device)
    device.scratch_bytes = scratch_bytes(options)
    model = Model(
        config,
        weights,
        device,
        adapter=stack_adapter(Adapter.from_tensors(lora, parameters.tensors), parameters.joined),
        positions=seq_len,
        dtype=np.dtype(compute),
        **activation_options(options, config),
    )
    return Trainer(model, AdamW(parameters, scale_loss=compute == "float16"), options), parameters


def random_step(index: int, seq_len: int, vocab: int, batch: int = 1) -> Step:
    rng = np.random.default_rng(index)
    ids = rng.integers(0, vocab, (batch, seq_len)).astype(np.int32)
    targets = np.roll(ids, -1, axis=1)
    targets[:, -1] = -100
    positions = np.tile(np.arange(seq_len, dtype=np.int32), (batch, 1))
    counts = batch * (seq_len - 1), batch * seq_len
    return Step(index, 0, [Batch(ids, targets, positions, np.zeros_like(ids), *counts)])
