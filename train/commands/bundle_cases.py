"""Self-test cases of training steps and decoding: every operator call of small models, recorded on the reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from wgrad.autograd.selftest.case import Case
from wgrad.autograd.selftest.recorded_cases import RecordingDevice, recorded
from wgrad.device.contract import Device
from wgrad.train.inference.generation import generate_ids
from wgrad.train.model.load_config import parse_model_config
from wgrad.train.model.lora import Adapter, LoraConfig, init_lora, linear_modules, lora_shapes
from wgrad.train.model.model import Model
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.model_inputs import Inputs
from wgrad.train.model.weights import WeightSpec, weight_specs
from wgrad.train.options.generate_config import Sampling
from wgrad.train.step.optim import AdamW, FlatParameters, ParameterSpec

_ROWS, _TOKENS = 2, 24
_SHAPE = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
# Qwen3 has norms of heads, and Qwen2 has biases.
_QWEN3 = {**_SHAPE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
_QWEN2 = {**_SHAPE, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def _value(spec: WeightSpec, rng: np.random.Generator) -> np.ndarray:
    value = rng.standard_normal(spec.shape).astype(np.float32)
    if spec.kind == "norm":
        return 1 + 0.2 * value
    return value * np.float32(0.3 if spec.kind == "bias" else 1.5 / spec.shape[-1] ** 0.5)


def _frozen(config: ModelConfig, device: Device, rng: np.random.Generator, double: bool) -> dict[str, Any]:
    weights: dict[str, Any] = {}
    for spec in weight_specs(config):
        value = _value(spec, rng)
        if spec.kind == "projection":
            weights[spec.name] = device.quantize(device.upload(value), double=double)
        else:
            kept = value if spec.kind in ("norm", "bias") else value.astype(ml_dtypes.bfloat16)
            weights[spec.name] = device.upload(kept)
    return weights


def _inputs(config: ModelConfig, device: Device, rng: np.random.Generator, dropout: bool) -> Inputs:
    count = _ROWS * _TOKENS
    ids, targets = (rng.integers(0, config.vocab_size, count).astype(np.int32) for _ in range(2))
    targets[rng.random(count) < 0.3] = -100
    doc_start = np.where(np.arange(_TOKENS) < 9, 0, 9).astype(np.int32)
    return Inputs(
        ids=device.upload(ids),
        positions=device.upload(np.tile(np.arange(_TOKENS, dtype=np.int32) - doc_start, _ROWS)),
        doc_start=device.upload(np.tile(doc_start, (_ROWS, 1))),
        cache_len=device.upload(np.zeros(1, np.int32)),
        targets=device.upload(targets),
        seed=device.upload(np.array([7, 1], np.uint32)) if dropout else None,
    )


def _step(model: Model, parameters: FlatParameters, inputs: Inputs) -> None:
    device, half = model.device, model.dtype == np.float16
    optimizer = AdamW(parameters, weight_decay=0.1, scale_loss=half)
    optimizer.set_lr(1e-3)
    model.loss(inputs).backward(device.download(optimizer.loss_scale) / 32)
    optimizer.step()


def _adapter_step(device: RecordingDevice, raw: dict[str, Any], dtype: Any, dropout: float) -> None:
    config, rng = parse_model_config(raw), np.random.default_rng(11)
    lora = LoraConfig(r=8, alpha=16.0, dropout=dropout)
    values = init_lora(lora_shapes(lora, linear_modules(config)), 0)
    parameters = FlatParameters([ParameterSpec(name, value.shape) for name, value in values.items()], device)
    for name, value in values.items():  # B too: while it is zero, half of the gradients vanish
        parameters.set(name, value if name.endswith("A") else 0.1 * rng.standard_normal(value.shape))
    weights = _frozen(config, device, rng, double=dropout > 0)
    adapter = Adapter.from_tensors(lora, parameters.tensors)
    model = Model(config, weights, device, adapter=adapter, positions=_TOKENS, dtype=dtype, recompute=dropout > 0)
    _step(model, parameters, _inputs(config, device, rng, dropout > 0))


def _full_step(device: RecordingDevice, raw: dict[str, Any], dtype: Any) -> None:
    config, rng = parse_model_config(raw), np.random.default_rng(12)
    specs = weight_specs(config)
    parameters = FlatParameters([ParameterSpec(s.name, s.shape, len(s.shape) > 1) for s in specs], device)
    for spec in specs:
        parameters.set(spec.name, _value(spec, rng))
    model = Model(config, parameters.tensors, device, positions=_TOKENS, dtype=dtype)
    _step(model, parameters, _inputs(config, device, rng, False))


def _decoding(device: RecordingDevice, raw: dict[str, Any], dtype: Any) -> None:
    config, rng = parse_model_config(raw), np.random.default_rng(13)
    model = Model(config, _frozen(config, device, rng, True), device, positions=16, dtype=dtype)
    prompt = rng.integers(0, config.vocab_size, 9).tolist()
    list(generate_ids(model, prompt, 3, Sampling()))


def training_cases(float16: bool = True) -> list[Case]:
    """Return the cases of steps with adapters (plain; with dropout, recomputation and double quantization), of a full
    step, and of decoding."""
    found: list[Case] = []
    for dtype in (np.float32, np.float16) if float16 else (np.float32,):
        name = np.dtype(dtype).name
        found += recorded(f"adapter step {name}", partial(_adapter_step, raw=_QWEN3, dtype=dtype, dropout=0.0))
        found += recorded(f"dropout step {name}", partial(_adapter_step, raw=_QWEN2, dtype=dtype, dropout=0.1))
        found += recorded(f"full step {name}", partial(_full_step, raw=_QWEN2, dtype=dtype))
        found += recorded(f"decoding {name}", partial(_decoding, raw=_QWEN3, dtype=dtype))
    return found
