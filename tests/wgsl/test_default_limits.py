"""Operators, and training, on a device with WebGPU's default limits and no features.

Such a device has 16 KiB of workgroup memory, 256 invocations of a workgroup, bindings of 128 MiB at multiples of 256
bytes, and neither float16 nor subgroups. Only its storage buffers are more than the default: the kernels need 11.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from tests.case_results import assert_case
from tests.conftest import require_wgpu
from tests.train.conftest import random_weights, tiny_config, write_checkpoint, write_text_data
from tests.train.gguf_writer import write_gguf
from wgrad.autograd.bind import bind
from wgrad.autograd.selftest.case import Case
from wgrad.autograd.selftest.cases import cases
from wgrad.train.commands.cli import main
from wgrad.train.model.model_files import SINGLE_FILE
from wgrad.train.run import session
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.runtime import adapters

LIMITS = {
    "max-buffer-size": 256 << 20,
    "max-storage-buffer-binding-size": 128 << 20,
    "max-storage-buffers-per-shader-stage": adapters.STORAGE_BUFFERS,
    "max-compute-workgroup-storage-size": 16 << 10,
    "max-compute-invocations-per-workgroup": 256,
    "max-compute-workgroup-size-x": 256,
    "max-compute-workgroup-size-y": 256,
    "max-compute-workgroup-size-z": 64,
    "max-compute-workgroups-per-dimension": 65535,
    "max-uniform-buffer-binding-size": 64 << 10,
    "min-storage-buffer-offset-alignment": 256,
    "min-uniform-buffer-offset-alignment": 256,
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KINDS = {**dict.fromkeys(PROJECTIONS, Kind.Q4_0), "embed_tokens": Kind.F16, "lm_head": Kind.F16}
# What float16 arrays are in: scales of frozen weights, and weights.
HALVES = ("round_weight/q4_0/27x96/float32", "grouped_linear/float16 many rows/131x3x2x70x40/float32")


@cache
def least_device() -> Any:
    def open_device(adapter: Any) -> Any:
        return adapter.request_device_sync(required_features=[], required_limits=LIMITS)

    require_wgpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapters, "open_device", open_device)
        device = bind(WgpuDevice)()
    device.software = device.shared_memory = False  # the kernels of a GPU
    device.reason = "with the default limits"
    return device


def test_the_device_has_no_more_than_the_defaults() -> None:
    device = least_device()
    assert {name: device._device.limits[name] for name in LIMITS} == LIMITS and not device._device.features
    assert not (device.float16 or device.subgroups or device.matrix_units or device.host_buffers)


@pytest.mark.parametrize("case", [c for c in cases(float16=False) if c.name in HALVES], ids=lambda case: case.name)
def test_weights_and_scales_are_read_from_the_bits_of_float16(case: Case) -> None:
    assert_case(case, least_device())


@pytest.mark.parametrize("size", [123, 124])
def test_float16_is_cast_from_its_bits(size: int, rng: np.random.Generator) -> None:
    device, x = least_device(), rng.standard_normal(size).astype(np.float16)
    np.testing.assert_array_equal(device.download(device.cast(device.upload(x), np.float32)), x.astype(np.float32))


@pytest.mark.all
@pytest.mark.parametrize("case", cases(float16=False), ids=lambda case: case.name)
def test_operators_run_within_the_default_limits(case: Case) -> None:
    assert_case(case, least_device())


def test_a_gguf_base_trains_within_the_default_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its embeddings are float16, and so are the scales of its 4-bit weights."""
    config = tiny_config(hidden_size=64, intermediate_size=96, head_dim=16, num_hidden_layers=1)
    weights = random_weights(config)
    folder = write_checkpoint(tmp_path / "model", config, weights)
    (folder / SINGLE_FILE).unlink()
    write_gguf(folder / "model.gguf", weights, KINDS)
    data, losses = write_text_data(tmp_path), []
    for device in (None, least_device()):
        if device is not None:
            monkeypatch.setattr(session, "select_device", lambda *given, chosen=device: chosen)
        out = tmp_path / "out"
        words = f"finetune --model {folder} --data {data} --out {out} --device cpu --lora-r 2 --max-length 24"
        words += " --max-steps 2 --logging-steps 1 --learning-rate 5e-3 --gradient-accumulation-steps 1 --no-sample"
        assert main(words.split()) == 0
        steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses.append([step["loss"] for step in steps if "loss" in step])
        shutil.rmtree(out)
    assert len(losses[0]) == 2 and losses[1] == pytest.approx(losses[0], rel=1e-4)
