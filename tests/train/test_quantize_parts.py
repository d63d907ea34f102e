"""Experts are quantized a few at a time: the bits of a whole layer's, and a fraction of the memory."""

from __future__ import annotations

import tracemalloc
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.conftest import wgpu_sibling
from tests.tools import oracle_package
from wgrad.device.errors import WgradError
from wgrad.train.files.fp8_files import with_fp8
from wgrad.train.files.safetensors_files import read_entries
from wgrad.train.model import quantize_parts as module
from wgrad.train.model import read_ahead
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.load_weights import Loader
from wgrad.train.model.quantize_parts import quantize_parts

torch, torch_files = oracle_package("torch"), oracle_package("safetensors.torch")
EXPERTS, HIDDEN, WIDTH = 37, 64, 48
SHAPE: dict[str, Any] = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "moe_intermediate_size": WIDTH}
SHAPE |= {"num_hidden_layers": 1, "vocab_size": 300, "head_dim": 16}
NAME = "model.layers.0.mlp.experts.gate_up_proj"


def apart(folder: Path) -> None:
    """Each expert's tensors by themselves, as published files have them."""
    arrays = load_file(folder / "model.safetensors")
    for name in [name for name in arrays if ".experts." in name]:
        value, layer = arrays.pop(name), name.rpartition(".")[0]
        for number, of_expert in enumerate(value):
            parts = {"gate_proj": of_expert[:WIDTH], "up_proj": of_expert[WIDTH:]}
            parts = parts if name == NAME else {"down_proj": of_expert}
            for part, rows in parts.items():
                arrays[f"{layer}.{number}.{part}.weight"] = np.ascontiguousarray(rows)
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})


def peaks_of(work: Any, device: Any) -> tuple[Any, int, int]:
    """Return the result of a call, and its peak bytes on the device and in NumPy."""
    before = device.memory().in_use_bytes
    tracemalloc.start()
    try:
        result = work()
        device.synchronize()
        return result, device.memory().peak_bytes - before, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("files", ["apart", "whole"])
@pytest.mark.usefixtures("wgpu_device")
def test_the_bits_are_those_of_a_whole_layer(files: str, make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint("Qwen3MoeForCausalLM", **SHAPE)
    if files == "apart":
        apart(folder)
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", 1 << 16)
    loader = Loader(folder, load_model_config(folder))
    spec = next(spec for spec in loader.specs if spec.name == NAME)
    found = {}
    for size in (1 << 30, 100_000):  # a part; the second is four experts
        monkeypatch.setattr(module, "PART_BYTES", size)
        device = wgpu_sibling()
        with closing(loader.read_ahead([spec], device)) as pieces:
            found[size] = peaks_of(lambda: loader.load(spec, device, pieces=pieces), device)  # noqa: B023 - called at once
        weight = found[size][0]
        arrays = {name: device.download(array) for name, array in weight.arrays().items()}
        full = device.upload(loader.files.read(spec).reshape(-1, HIDDEN))
        for name, array in device.quantize(full, double=True).arrays().items():
            np.testing.assert_array_equal(arrays[name], device.download(array))
        assert weight.shape == full.shape
    whole, parts = found.values()
    assert whole[1] > full.nbytes and parts[1] < full.nbytes * 0.4
    assert files == "whole" or (whole[2] > 2 * full.nbytes and parts[2] < full.nbytes * 0.4)
    plan = device.dry_run()
    loader.load(spec, plan, contents=False)
    assert plan.memory().peak_bytes == pytest.approx(parts[1], rel=0.1)


def test_fp8_is_decoded_for_the_experts_of_a_part(tmp_path: Path, cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With scales of blocks and with one of all; and a value that is not finite is found in any part."""
    codes = torch.from_numpy(np.random.default_rng(0).standard_normal((9, 70, 64))).to(torch.float8_e4m3fn)
    scales = torch.rand(9, 3, 2) + 0.5
    for block, of_block in (((32, 48), scales), (None, scales[0, 0, 0])):
        path = tmp_path / "fp8.safetensors"
        torch_files.save_file({"w": codes, "w_scale_inv": of_block}, path)
        entry = with_fp8(read_entries(path, "--model"), block)["w"]
        whole, rows = entry.array(), list(entry.blocks(4))
        assert [len(part) for part in rows] == [4, 4, 1]
        np.testing.assert_array_equal(np.concatenate(rows), whole)
        kind = np.dtype(np.float32)
        monkeypatch.setattr(module, "PART_BYTES", 70 * 64 * 4 * 3)
        made = quantize_parts(entry, kind, cpu, 64, True)
        wanted = cpu.quantize(cpu.upload(whole.astype(np.float32).reshape(-1, 64)), double=True)
        for name, array in wanted.arrays().items():
            np.testing.assert_array_equal(made.arrays()[name], array)
    codes[8, 69, 63] = torch.tensor(float("nan")).to(torch.float8_e4m3fn)
    torch_files.save_file({"w": codes, "w_scale_inv": scales}, path)
    with pytest.raises(WgradError, match="not finite"):
        quantize_parts(with_fp8(read_entries(path, "--model"), (32, 48))["w"], kind, cpu, 64, True)
