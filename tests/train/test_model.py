"""The decoder without an oracle package: cached decoding, dtypes, tables, adapters in the graph."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.families.table import FAMILY_ROWS
from tests.train.conftest import tiny_config
from wgrad.autograd import functional as F
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.tensor import Tensor, no_grad
from wgrad.device.contract import Device
from wgrad.device.errors import ShapeError, WgradError
from wgrad.train.model import model as model_file
from wgrad.train.model.kv_cache import KVCache
from wgrad.train.model.load_config import load_model_config, parse_model_config
from wgrad.train.model.load_weights import load_frozen
from wgrad.train.model.lora import Adapter, LoraConfig, linear_modules, lora_shapes
from wgrad.train.model.model import Model
from wgrad.train.model.model_files import ModelFiles, open_files
from wgrad.train.model.model_inputs import Inputs
from wgrad.train.model.rope_scaling import RopeConfig, rope_tables
from wgrad.train.model.weights import HEAD_BIAS, activation_bytes, weight_specs
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.step import activations
from wgrad.train.step.activations import keeps_attention, mlp_chunk_bytes, recomputed_layers
from wgrad.train.step.build import build_trainable, count_parameters
from wgrad.train.step.optim import FlatParameters, ParameterSpec

TOKENS = 19
CASES = {name: row.in_cache for name, row in FAMILY_ROWS.items()}


def inputs_for(device: Device, ids: np.ndarray, begin: int = 0) -> Inputs:
    return Inputs(
        ids=device.upload(np.ascontiguousarray(ids, np.int32)),
        positions=device.upload(np.arange(begin, begin + len(ids), dtype=np.int32)),
        doc_start=device.upload(np.zeros((1, len(ids)), np.int32)),
        cache_len=device.upload(np.array([begin], np.int32)),
    )


def exact_logits(folder: Path, ids: np.ndarray) -> np.ndarray:
    """The NumPy device in float64."""
    device, config = ReferenceDevice(), load_model_config(folder)
    files = open_files(folder, config)[0]
    weights = {s.name: device.upload(files.read(s).astype(np.float64)) for s in weight_specs(config)}
    model = Model(config, weights, device, positions=64, dtype=np.float64)
    hidden = model.hidden(inputs_for(device, ids)).data
    logits = np.asarray(hidden, np.float64) @ np.asarray(model.head, np.float64).T + weights.get(HEAD_BIAS, 0.0)
    cap = config.logit_softcap
    return np.tanh(logits / cap) * cap if cap else logits


def frozen(folder: Path, device: Device, **options: Any) -> Model:
    config = load_model_config(folder)
    return Model(config, load_frozen(folder, config, device, quantize=False), device, positions=64, **options)


@pytest.mark.parametrize("architecture", CASES)
def test_decoding_with_a_cache_gives_the_logits_of_the_whole_sequence(
    architecture: str, make_checkpoint: Any, device: Device
) -> None:
    folder = make_checkpoint(architecture, **CASES[architecture])
    ids = np.random.default_rng(0).integers(0, 300, TOKENS).astype(np.int32)
    true = exact_logits(folder, ids)
    plain = frozen(folder, ReferenceDevice())
    limit = 2 * np.linalg.norm(
        plain.device.download(plain.logits(plain.hidden(inputs_for(plain.device, ids)).data)) - true
    )
    model = frozen(folder, device)
    cache = KVCache.empty(model.config, 1, TOKENS + 3, np.float32, device)
    rows = [device.download(model.logits(model.hidden(inputs_for(device, ids[:8]), cache).data))]
    for at in range(8, TOKENS):
        rows.append(device.download(model.logits(model.hidden(inputs_for(device, ids[at : at + 1], at), cache).data)))
    assert np.linalg.norm(np.concatenate(rows) - true) <= limit


@pytest.mark.parametrize(
    ("dtype", "scale"), [(np.float32, 6.928203), (np.float16, 6.9296875), (ml_dtypes.bfloat16, 6.9375)]
)
def test_the_scale_of_an_embedding_is_of_the_compute_dtype(
    dtype: Any, scale: float, make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sqrt(48) as torch rounds it to each."""
    model = frozen(make_checkpoint(), ReferenceDevice(), dtype=dtype)
    model.config = replace(model.config, embedding_scale=48**0.5)
    seen: list[float] = []

    def watched(x: Any, alpha: float) -> Any:
        seen.append(alpha)
        return x

    monkeypatch.setattr(F, "scale", watched)
    model.hidden(inputs_for(model.device, np.arange(3)))
    assert seen == [pytest.approx(scale, rel=1e-7)]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_the_cache_costs_no_launch_of_its_own(architecture: str, make_checkpoint: Any, device: Device) -> None:
    """Keys are rotated into it and values copied in the launch that only rotates keys where there is no cache."""
    model = frozen(make_checkpoint(architecture), device)
    inputs, counts = inputs_for(device, np.array([7], np.int32)), []
    for cache in (None, KVCache.empty(model.config, 1, 1, np.float32, device)):
        with no_grad(), device.capture() as replay:
            model.hidden(inputs, cache)
        counts.append(replay.dispatches)
    assert counts[0] == counts[1] > 20


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "SmolLM3ForCausalLM"])  # the latter: a layer without rope
def test_a_full_cache_is_refused_before_anything_is_written(architecture: str, make_checkpoint: Any) -> None:
    device = ReferenceDevice()  # whose cache_len can be looked at
    model = frozen(make_checkpoint(architecture, **CASES[architecture]), device)
    config = model.config
    if architecture == "SmolLM3ForCausalLM":  # its first layer
        config = model.config = replace(config, use_rope=(False, *config.use_rope[1:]))
    cache = KVCache.empty(config, 1, 9, np.float32, device)
    inputs = inputs_for(device, np.arange(4, dtype=np.int32), 6)
    with pytest.raises(ShapeError, match="cache_len must leave room for 4 more tokens in the cache of 9, got 6"):
        model.hidden(inputs, cache)
    assert not any(device.download(a).any() for a in (*cache.keys.values(), *cache.values.values()))


def test_small_caches_of_layers_share_a_buffer(make_checkpoint: Any, wgpu_device: Any) -> None:
    """Layers' caches of one text have bytes of their own; a server's caches, which grow, and large ones lie apart."""
    config = load_model_config(make_checkpoint())
    taken = wgpu_device.memory().in_use_bytes
    cache = KVCache.empty(config, 1, 7, np.float16, wgpu_device)
    assert wgpu_device.memory().in_use_bytes - taken < 2 * (2 * 7 * 48 * 2 + 1024) * config.num_hidden_layers
    for arrays in (cache.keys, cache.values):
        begins = sorted(array.offset for array in arrays.values())
        assert len({array.lease for array in arrays.values()}) == 1 and len(arrays) == config.num_hidden_layers > 1
        assert begins[0] == 0 and min(np.diff(begins)) >= cache.keys[0].nbytes and not any(n % 256 for n in begins)
    for shape in ({"rows": 1, "length": 7}, {"length": 1 << 19}):
        apart = KVCache.empty(config, 1, **shape, dtype=np.float16, device=wgpu_device.dry_run())
        assert len({array.lease for array in apart.keys.values()}) == config.num_hidden_layers


@pytest.mark.parametrize("short", [np.float16, ml_dtypes.bfloat16])
def test_16_bits_are_as_exact_as_plain_ones(make_checkpoint: Any, device: Device, short: Any) -> None:
    if not getattr(device, short.__name__):
        pytest.skip(f"{device.description} has no {short.__name__}")
    folder = make_checkpoint("LlamaForCausalLM")
    ids = np.random.default_rng(0).integers(0, 300, TOKENS).astype(np.int32)
    true = exact_logits(folder, ids)
    errors = []
    for where in (ReferenceDevice(), device):
        model = frozen(folder, where, dtype=short)
        hidden = model.hidden(inputs_for(where, ids))
        assert hidden.dtype == short
        errors.append(np.linalg.norm(where.download(model.logits(hidden.data)) - true))
    assert errors[1] <= 2 * errors[0] < (0.1 if short == np.float16 else 0.2) * np.linalg.norm(true)


def test_gradients_of_an_adapter_are_those_of_the_merged_weight(make_checkpoint: Any, device: Device) -> None:
    """dL/dA = s B^T dW and dL/dB = s dW A^T, where W + s B A is trained as a whole."""
    folder = make_checkpoint("LlamaForCausalLM")
    config = load_model_config(folder)
    lora = LoraConfig(r=3, alpha=7.0, target_modules=("v_proj", "down_proj"))
    shapes = lora_shapes(lora, linear_modules(config))
    generator = np.random.default_rng(2)
    values = {n: (0.3 * generator.standard_normal(s)).astype(np.float32) for n, s in shapes.items()}
    ids = generator.integers(0, 300, TOKENS).astype(np.int32)

    parameters = FlatParameters([ParameterSpec(n, s) for n, s in shapes.items()], device)
    for name, value in values.items():
        parameters.set(name, value)
    weights = load_frozen(folder, config, device, quantize=False)
    adapter = Adapter.from_tensors(lora, parameters.tensors)
    inputs = inputs_for(device, ids)
    inputs.targets = device.upload(np.roll(ids, -1))
    Model(config, weights, device, adapter=adapter, positions=64).loss(inputs).backward()

    merged = FlatParameters([ParameterSpec(s.name, s.shape) for s in weight_specs(config)], device)
    for spec in weight_specs(config):
        weight: np.ndarray = device.download(weights[spec.name])
        module = spec.name.removesuffix(".weight")
        if module in adapter.modules:
            weight = weight + adapter.modules[module].scaling * values[module + ".lora_B"] @ values[module + ".lora_A"]
        merged.set(spec.name, weight)
    Model(config, merged.tensors, device, positions=64).loss(inputs).backward()

    assert len(adapter.modules) == 4
    for module, part in adapter.modules.items():
        dw = device.download(merged.tensors[module + ".weight"].gradient).astype(np.float64)
        a, b = (values[f"{module}.lora_{side}"].astype(np.float64) for side in "AB")
        for side, wanted in (("A", part.scaling * b.T @ dw), ("B", part.scaling * dw @ a.T)):
            got = device.download(parameters.tensors[f"{module}.lora_{side}"].gradient)
            # Two float32 computations of the same thing by different routes: a few hundred roundings apart.
            assert np.linalg.norm(got - wanted) <= 2.0**-23 * 300 * np.linalg.norm(wanted), (module, side)


def test_rotary_tables_rotate_by_position_times_frequency() -> None:
    cos, sin = rope_tables(RopeConfig(head_dim=8, theta=100.0), 50)
    for position in (0, 1, 49):
        for pair in range(4):
            angle = position * 100.0 ** (-pair / 4)
            assert cos[position, pair] == pytest.approx(math.cos(angle), abs=49 * 2.0**-23)
            assert sin[position, pair] == pytest.approx(math.sin(angle), abs=49 * 2.0**-23)


def test_parameters_are_counted_and_checkpointing_follows_the_size(make_checkpoint: Any) -> None:
    folder = make_checkpoint("LlamaForCausalLM", tie_word_embeddings=True)
    config = load_model_config(folder)
    assert count_parameters(config) == sum(int(np.prod(e.shape)) for e in ModelFiles(folder).entries.values())
    large = parse_model_config(tiny_config(vocab_size=1 << 18, hidden_size=1 << 14, tie_word_embeddings=True))
    assert count_parameters(large) > 1 << 32  # the embedding alone has more than 32 bits count
    assert activation_bytes(config, 200, 4) == 2 * activation_bytes(config, 100, 4)
    long: dict[str, Any] = {"max_length": 1 << 20, "batch_size": 8}
    layers = config.num_hidden_layers
    cases: list[tuple[Any, int, int]] = [("auto", 0, layers), (None, 0, layers), (True, layers, layers), (1, 1, 1)]
    for given, short_rows, long_rows in cases:
        assert recomputed_layers(RunOptions(max_length=64, gradient_checkpointing=given), config) == short_rows
        assert recomputed_layers(RunOptions(gradient_checkpointing=given, **long), config) == long_rows
    assert recomputed_layers(RunOptions(gradient_checkpointing=False, **long), config) == 0
    with pytest.raises(WgradError, match=f"--gradient-checkpointing: must be at most {layers}, the layers"):
        recomputed_layers(RunOptions(gradient_checkpointing=layers + 1), config)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, True),
        ({"max_length": 8191}, False),
        ({"max_length": 64, "keep_attention": True}, True),
        ({"keep_attention": False}, False),
        ({"batch_size": 1 << 12}, False),  # more than 4 GiB
        ({"vram": "8GiB"}, False),
        ({"memory_limit": "8GiB", "keep_attention": True}, True),
        ({"offload_activations": True}, False),
        ({"stream_weights": "on"}, False),
        ({"gradient_checkpointing": False}, False),
    ],
)
def test_attention_is_kept_in_long_rows_that_leave_room(
    make_checkpoint: Any, options: dict[str, Any], kept: bool
) -> None:
    config = RunOptions(**{"max_length": 8192, "gradient_checkpointing": True, "compute": "float16", **options})
    assert keeps_attention(config, load_model_config(make_checkpoint())) is kept


@pytest.mark.parametrize(
    ("options", "mib"),
    [
        ({}, None),
        ({"offload_activations": True}, None),
        ({"memory_limit": "3GiB"}, 192),
        ({"vram": "16GiB"}, 512),
        ({"memory_limit": "80GiB"}, 768),
        ({"memory_limit": "3GiB", "mlp_chunk": "64MiB"}, 64),
    ],
)
def test_a_limit_makes_the_chunks_of_long_rows_smaller(options: dict[str, Any], mib: int | None) -> None:
    assert mlp_chunk_bytes(RunOptions(**options)) == (mib and mib << 20)


@pytest.mark.parametrize(("limit", "mib"), [("", 768), ("3GiB", 192), ("80GiB", 768)])
def test_a_limit_makes_the_scratch_of_operators_smaller(limit: str, mib: int) -> None:
    assert activations.scratch_bytes(RunOptions(memory_limit=limit or None)) == mib << 20


def test_a_limit_bounds_chunks_and_scratch_of_the_model(make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found, device = list[int](), ReferenceDevice()
    monkeypatch.setattr(model_file, "MLP_CHUNKS_ABOVE", 0)

    def noted(fn: Any, x: Tensor, rows: int, **options: Any) -> Tensor:
        found.append(rows)
        return x

    monkeypatch.setattr(model_file, "in_row_chunks", noted)
    folder = make_checkpoint()
    a_row = 6 * load_model_config(folder).intermediate_size * 4
    for limit, rows, scratch in ((None, 4096, 768), ("3GiB", 128, 192)):
        monkeypatch.setattr(model_file, "MLP_CHUNK_BYTES", 4096 * a_row)
        monkeypatch.setattr(activations, "LEAST_MLP_CHUNK_BYTES", 128 * a_row)
        monkeypatch.setattr(activations, "MLP_CHUNK_BYTES", 128 * a_row)
        config = RunOptions(memory_limit=limit, gradient_checkpointing=True, compute="float32", max_length=8192)
        model = build_trainable(config, load_model_config(folder), folder, device, positions=8192).model
        inputs = Inputs.empty(model, 1, 8192)
        model._mlp_half(0, Tensor(device.zeros((8192, model.config.hidden_size)), device), inputs, None)
        assert found.pop() == rows and device.scratch_bytes == scratch << 20
