"""Launches and memory of a whole step, and the arrays alive at its peak, by bench/count_launches.py.

It makes dry runs with the kernels of a large GPU: no device is needed, and the numbers are the same everywhere.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wgrad.autograd.select_device import gpu_elsewhere
from wgrad.train.commands.bench_model import SHAPES, RandomWeights
from wgrad.train.model.load_config import parse_model_config
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.plan import fit
from wgrad.wgsl.attention.attention_backward import MOST_OF_A_WORKGROUP, MOST_ON_UNITS
from wgrad.wgsl.runtime.submission_size import LEAST_WORK_GPU


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A script of bench/ by its name, as a module."""
    bench = Path(__file__).parents[2] / "bench"
    monkeypatch.syspath_prepend(str(bench))

    def load(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(name, bench / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def counter(scripts: Callable[[str], Any]) -> Any:
    return scripts("count_launches")


@pytest.mark.parametrize("compute, units", [("float32", False), ("float16", True)])
def test_a_step_of_the_135m_takes_at_most_1450_launches(counter: Any, compute: str, units: bool) -> None:
    """A step of SmolLM2-135M, T 2048: with stacks at most 1,450 launches, and no more memory than
    bench/notes/launches.md says."""
    counted = counter.count("smollm2-135m", 2048, compute, units)
    counts = counted.launches
    decoding = counts["linear_quantized", "quantize_decode"] + counts["linear_quantized_backward", "quantize_decode"]
    assert decoding == (239 if units else 0)
    assert not units or sum(counts.values()) <= 1450
    assert counted.peak_bytes <= (1.93 if compute == "float32" else 1.30) * 2**30


@pytest.mark.parametrize(
    "shape, compute, batch, offloaded, keep, gib",
    [
        ("smollm2-135m", "float16", 8, 24, False, 0.82),
        ("llama-3.2-1b", "float32", 1, 0, False, 1.99),
        ("llama-3.2-1b", "float16", 1, 0, False, 1.99),
        ("llama-3.2-1b", "float16", 4, 13, True, 2.37),
        ("llama-3.1-8b", "float32", 1, 7, False, 6.54),
        ("llama-3.1-8b", "float16", 1, 0, False, 6.54),
        ("llama-3.1-8b", "float16", 4, 24, True, 8.17),
    ],
)
def test_a_step_takes_no_more_than_unsloths(
    counter: Any, shape: str, compute: str, batch: int, offloaded: int, keep: bool, gib: float
) -> None:
    """Unsloth 2026.10.9's peaks with all layers recomputed, in the settings of bench/notes/launches.md.

    The 135M with one sequence is in test_a_step_of_the_135m_takes_at_most_1450_launches.

    Args:
        offloaded: Layers whose inputs are offloaded.
        keep: Whether attention outputs are kept, too.
    """
    options = {"checkpointing": True, "offload": offloaded, "keep_attention": keep}
    counted = counter.count(shape, 2048, compute, compute == "float16", batch=batch, **options)
    assert counted.peak_bytes <= gib * 2**30


def test_rows_in_chunks_decode_a_weight_once_a_pass(counter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four weights of a layer, multiplied with forward, again and for dx, decode once each time, those that four chunks
    take too. `down_proj` is not made again, gate and up are one for both; dx ends above the first q, k and v."""
    monkeypatch.setattr("wgrad.train.model.model.MLP_CHUNK_BYTES", 192 << 20)
    counts = counter.count("llama-3.2-1b", 2048, "float16", True, batch=4, checkpointing=True).launches
    decodes = {operator: number for (operator, shader), number in counts.items() if shader == "quantize_decode"}
    assert decodes == {"linear_quantized": 16 * 7, "linear_quantized_backward": 16 * 3 - 1}


def activations(counted: Any) -> dict[str, int]:
    """Arrays of at least 1 MiB together that a step has made and not yet dropped at the peak."""
    parts = {" ".join(part.label.split()): part for part in counted.parts if part.nbytes >= 1 << 20}
    return {label: part.number for label, part in parts.items() if not label.startswith("held before")}


def test_the_peak_holds_what_the_backward_reads(counter: Any) -> None:
    """In the loss's first chunk: of 30 layers what their backward reads, and no more. SwiGLU's output is made again."""
    assert activations(counter.count("smollm2-135m", 2048, "float16", True)) == {
        "linear_quantized float16 2048 x 3072": 30,  # gate and up
        "linear_quantized float32 2048 x 576": 60,  # the residual stream after each half of a layer
        "rms_norm float16 2048 x 576": 61,  # what goes into q, k and v, into gate and up, and into the head
        "rope_split float16 2048 x 9 x 64": 30,
        "rope_split float16 2048 x 3 x 64": 60,
        "attention float16 1 x 2048 x 9 x 64": 30,
        "attention float32 1 x 9 x 2048": 30,  # log-sum-exp
        "gemm float32 2048 x 48": 30,  # LoRA's u of q, k and v
        "gemm float32 2048 x 32": 30,
        "gemm float32 2048 x 16": 60,
        "linear_cross_entropy float32 512 x 49152": 1,
        "linear_cross_entropy float16 512 x 49152": 1,
        "linear_cross_entropy float32 2048 x 576": 1,
        "linear_cross_entropy float32 8 x 512 x 576": 1,
    }


def test_the_peak_holds_one_layer_where_all_are_recomputed(counter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the backward of the last layer's MLP: no input of a layer but that of this one and, on its way, the one below;
    of the layer what attention's backward reads; and one weight in float16."""
    monkeypatch.setattr("wgrad.train.step.activations.SCRATCH_BYTES", 0)  # else in attention's backward, with stored ds
    found = activations(counter.count("llama-3.2-1b", 2048, "float16", True, checkpointing=True, offload=True))
    assert found == {
        "linear_quantized float16 2048 x 16384": 1,
        "linear_quantized float32 2048 x 2048": 2,
        "linear_quantized_backward float16 2048 x 8192": 2,  # the gradient of SwiGLU's output; the weight
        "swiglu float16 2048 x 8192": 1,
        "rms_norm float16 2048 x 2048": 2,
        "rms_norm_backward float32 2048 x 2048": 1,
        "rope_split float16 2048 x 32 x 64": 1,
        "rope_split float16 2048 x 8 x 64": 2,
        "attention float16 1 x 2048 x 32 x 64": 1,
        "cast float16 2048 x 2048": 1,
        "no operator float32 2048 x 2048": 1,
    }


@pytest.mark.parametrize("units", [False, True])
def test_the_8b_trains_in_3_gib_with_its_weights_in_main_memory(counter: Any, scripts: Any, units: bool) -> None:
    """A row of 8,192 tokens, in float16: an evaluation and a sample before and after steps."""
    device = counter.counting_device(units)
    scripts("bench_streaming").run_dry("llama-3.1-8b", 8192, "float16", device, 3 << 30)
    assert device.memory().peak_reserved_bytes <= 3 << 30


_KINDS = ("", "_backward_dq", "_backward_dkv", "_matrix", "_matrix_dq", "_matrix_dq_stored", "_matrix_dkv")
_TILES_OF_ATTENTION = {f"attention{kind}" for kind in _KINDS}
_DENSE = list(product(("smollm2-135m", "llama-3.2-1b", "llama-3.1-8b"), (2048, 32_768), (False, True, "int8")))
# DeltaNet and convolutions; experts, and eight query heads for each key head.
_OTHERS = (("qwen3.5-4b", 32_768, False), ("qwen3-30b-a3b", 32_768, True), ("qwen3-30b-a3b", 32_768, False))
_LAYERS = {"qwen3.5-4b": 4, "qwen3-30b-a3b": 1}  # with all kinds of launches


@pytest.mark.parametrize("shape, seq_len, units", [*_DENSE, *_OTHERS])
def test_no_launch_takes_long_on_a_gpu_that_is_not_known(
    scripts: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, shape: str, seq_len: int, units: Any
) -> None:
    """At most 200 ms on one of 0.5 TFLOP/s and 25 GB/s, by which they are split. No attention workgroup takes longer
    on one of eight compute units. As many layers as have all kinds of launches, and a vocabulary of 128k or more."""
    counter = scripts("count_launches")
    train = sys.modules["bench_train"]
    sizes = train.SHAPES[shape]
    sizes = replace(sizes, layers=_LAYERS.get(shape, 2), vocab=max(sizes.vocab, 128_256))
    monkeypatch.setitem(train.SHAPES, shape, sizes)
    zeros = lambda self, spec: np.broadcast_to(self.normal[:1], spec.shape)  # noqa: E731 - no memory for a table
    monkeypatch.setattr(RandomWeights, "table", zeros)
    monkeypatch.setitem(counter.CARD, "int8_products", units == "int8")
    monkeypatch.setattr(counter.Counting, "dispatch_work", LEAST_WORK_GPU)
    launches: list[tuple[str, float, int]] = []
    workgroups: dict[str, float] = {}  # the most work of one, in the mean over a dispatch

    def launch(self: Any, shader: str, arrays: Any, params: Any, *_: Any, work: float = 0.0, **__: Any) -> None:
        launches.append((shader, work, sum(array.nbytes for array in arrays if array is not None)))
        if shader in _TILES_OF_ATTENTION:
            workgroups[shader] = max(workgroups.get(shader, 0.0), work / (params[-1] - params[-2]))

    monkeypatch.setattr(counter.Counting, "launch", launch)
    counter.count(
        shape, seq_len, "float16" if units is True else "float32", units is True, checkpointing=seq_len > 2048
    )
    newer = {"qwen3.5-4b": ("delta_rule_scan", "short_conv"), "qwen3-30b-a3b": ("moe_combine", "moe_group")}
    assert {shader for shader, *_ in launches}.issuperset(newer.get(shape, ()))
    seconds = 0.2
    assert LEAST_WORK_GPU == seconds * 0.5e12
    assert max(launches, key=lambda of: of[1])[1] <= LEAST_WORK_GPU
    assert max(launches, key=lambda of: of[2])[2] <= seconds * 25e9
    most = {True: MOST_ON_UNITS, False: MOST_OF_A_WORKGROUP}
    assert len(workgroups) == 3 and MOST_OF_A_WORKGROUP == LEAST_WORK_GPU / 8
    assert {shader: mean for shader, mean in workgroups.items() if 2 * mean > most["matrix" in shader]} == {}
    if seq_len > 2048:  # of parts of attention the heaviest have twice the mean
        assert max(work for shader, work, _ in launches if shader.startswith("attention")) <= LEAST_WORK_GPU / 2


def test_few_plans_find_what_streamed_experts_leave_on_the_device(
    scripts: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Qwen3-30B-A3B with 12 layers: one layer more, or one input less offloaded, does not fit."""
    shape, layers, limit, ran = replace(SHAPES["qwen3-30b-a3b"], layers=12), 12, 3040 << 20, list[int]()
    scripts("bench_train").write_shape(shape, tmp_path)
    plain = fit.run_dry

    def noted(options: Any, model: Any, *rest: Any) -> Any:
        ran.append(model.num_hidden_layers)
        return plain(options, model, *rest)

    monkeypatch.setattr(fit, "run_dry", noted)
    config = RunOptions(
        max_length=2048, batch_size=1, gradient_accumulation_steps=1, compute="float16", memory_limit=str(limit),
        stream_weights="on",
    )  # fmt: skip
    search = fit.Fit(config, parse_model_config(shape.config()), tmp_path, gpu_elsewhere(""), 24, limit)
    found = search.choose([1]).config
    assert ran.count(layers) <= 8, ran  # 9 without what fewer layers tell
    resident, offloaded = found.resident_layers, found.offload_activations
    assert resident is not None and 0 < resident < layers and offloaded is not True and 0 < offloaded < layers - 1
    mode: dict[str, Any] = {"gradient_checkpointing": True}
    assert search.plan(**mode, offload_activations=True, resident_layers=resident + 1) is None
    assert search.plan(**mode, offload_activations=offloaded - 1, resident_layers=resident) is None
