"""Base models in GGUF files that the gguf package wrote: values, rows of q and k, and what is refused."""

from __future__ import annotations

import builtins
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from tests.train.conftest import random_weights, tiny_config, write_checkpoint
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.contract import Device
from wgrad.device.errors import WgradError
from wgrad.device.formats.frozen_weight import FrozenWeight, gguf_formats
from wgrad.train.data.packing import BatchStream, Document
from wgrad.train.model.model_config import load_model_config
from wgrad.train.model.model_files import SINGLE_FILE, ModelFiles, load_frozen
from wgrad.train.model.weights import weight_specs
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.run import build
from wgrad.train.run.trainer import Trainer

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # rows of whole blocks
HEADS = {"q_proj": 4, "k_proj": 2}


def permuted(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head for rotary pairs side by side: row 2i is row i, row 2i + 1 is row i + half."""
    halves = np.stack(np.split(w.reshape(heads, -1, w.shape[-1]), 2, axis=1), axis=2)
    return halves.reshape(w.shape)


def write_gguf(path: Path, weights: dict[str, np.ndarray], kind: Kind, architecture: str = "llama") -> None:
    """As llama.cpp's converter does: matrices in `kind`, norms in float32."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_head_count(HEADS["q_proj"])
    writer.add_head_count_kv(HEADS["k_proj"])
    for name, value in weights.items():
        heads = HEADS.get(name.split(".")[-2], 0)
        value = permuted(value, heads) if heads else value
        stored = kind if value.ndim == 2 else Kind.F32
        writer.add_tensor(names.get_name(name, (".weight",)), gguf.quantize(value, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def restored(weights: dict[str, np.ndarray], kind: Kind) -> dict[str, np.ndarray]:
    """What the gguf package makes of the matrices."""
    return {n: gguf.dequantize(gguf.quantize(w, kind), kind) if w.ndim == 2 else w for n, w in weights.items()}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Callable[[Kind], tuple[Path, Path]]:
    """checkpoints(kind) -> a folder with a GGUF file, and one in safetensors with the values restored from it."""

    def make(kind: Kind) -> tuple[Path, Path]:
        config = tiny_config(**SIZES)
        weights = random_weights(config)
        plain = write_checkpoint(tmp_path / "plain", config, restored(weights, kind))
        folder = tmp_path / "gguf"
        shutil.copytree(plain, folder)
        (folder / SINGLE_FILE).unlink()
        write_gguf(folder / "model.gguf", weights, kind)
        return folder, plain

    return make


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, *(Kind[name] for name in gguf_formats())])
def test_a_file_is_the_same_model(kind: Kind, checkpoints: Any) -> None:
    folder, plain = checkpoints(kind)
    cpu, config = ReferenceDevice(), load_model_config(folder)
    found = load_frozen(folder, config, cpu, quantize=False)
    wanted = load_frozen(plain, config, cpu, quantize=False)
    for spec in weight_specs(config):
        value, frozen = found[spec.name], spec.kind == "projection" and kind.name in gguf_formats()
        assert isinstance(value, FrozenWeight) == frozen
        values = cpu.dequantize(value) if frozen else value.astype(np.float32)
        np.testing.assert_array_equal(values, wanted[spec.name], spec.name)


@pytest.mark.parametrize("name", gguf_formats())
def test_a_step_is_that_of_the_restored_values(
    name: str, checkpoints: Any, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, plain = checkpoints(Kind[name])
    documents = [Document(np.arange(i, i + 17, dtype=np.int32) % 40, np.ones(17, bool)) for i in range(4)]
    made = []
    for where, frozen in ((folder, True), (plain, False)):
        if not frozen:
            monkeypatch.setattr(build, "load_frozen", partial(load_frozen, quantize=False))
        config = RunOptions(rank=3, alpha=6.0, seq_len=21, batch_size=2, max_steps=1, compute="float32")
        built = build.build_trainable(config, load_model_config(where), where, device, positions=21)
        assert any(isinstance(w, FrozenWeight) for w in built.model.weights.values()) == frozen
        trainer = Trainer(built.model, build.build_optimizer(config, built.parameters), config)
        for step in BatchStream(documents, config):
            trainer.step(step, 5e-3)
        made.append((trainer.read_history()[0, 0], {n: built.parameters.get(n) for n in built.parameters.tensors}))
    (loss, found), (plain_loss, wanted) = made
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    for part, value in wanted.items():
        np.testing.assert_allclose(found[part], value, rtol=1e-4, atol=1e-6, err_msg=part)


def test_the_digest_is_of_the_contents(checkpoints: Any, tmp_path: Path) -> None:
    folder, _ = checkpoints(Kind.F32)
    before = ModelFiles(folder).digest()
    weights = random_weights(tiny_config(**SIZES))
    weights["model.norm.weight"][3] += 1
    write_gguf(folder / "model.gguf", weights, Kind.F32)
    assert ModelFiles(folder).digest() != before


def test_what_cannot_be_read_is_told(checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = checkpoints(Kind.F32)
    path, weights = folder / "model.gguf", random_weights(tiny_config(**SIZES))
    whole = path.read_bytes()

    def refused(message: str) -> None:
        with pytest.raises(WgradError, match=message):
            ModelFiles(folder).check(load_model_config(folder))

    path.write_bytes(whole[: len(whole) // 2])
    refused(r"model.gguf is cut off or damaged \(.*\): fetch the file again")
    path.write_bytes(b"not one" + whole)
    refused("model.gguf is cut off or damaged .GGUF magic invalid.")
    name = b"blk.0.attn_k.weight"
    place = whole.index(name) + len(name) + 4 + 2 * 8 + 4  # dimensions, type
    path.write_bytes(whole[:place] + bytes(8) + whole[place + 8 :])
    refused(
        "blk.0.attn_k.weight must begin at byte [0-9]+, after the tensor before it, got [0-9]+: fetch the file again"
    )
    head = whole[:16] + (1).to_bytes(8, "little") + (1).to_bytes(8, "little") + b"a" + (9).to_bytes(4, "little")
    for kind, claimed in (
        (9, 1),
        (8, 2**60),
        (4, 2**60),
    ):  # arrays in arrays; more strings, more numbers than there are
        path.write_bytes(head + (kind.to_bytes(4, "little") + claimed.to_bytes(8, "little")) * 3000)
        refused("model.gguf is cut off or damaged")
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    refused("has its numbers in the other byte order")
    write_gguf(path, weights, Kind.F32, "qwen2")
    refused("general.architecture must be llama, got 'qwen2'")
    write_gguf(path, weights, Kind.Q5_0)
    refused("is Q5_0: expected F32, F16, BF16")
    path.write_bytes(whole)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    refused(r"mlp.gate_proj.weight in .*model.gguf has shape \[96, 64\]: config.json asks for \[128, 64\]")
    shutil.copy(path, folder / "second.gguf")
    refused(r"must have one .gguf file, got 2 \(model.gguf, second.gguf\)")
    (folder / "second.gguf").unlink()
    plain = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    refused(r"takes a package: pip install 'wgrad\[gguf\]'")
