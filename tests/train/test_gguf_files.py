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
from tests.train.gguf_writer import ALL, LAYERS, Kinds, kind_of, restored, write_gguf
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.contract import Device
from wgrad.device.errors import WgradError
from wgrad.device.formats.frozen_weight import FrozenWeight, gguf_formats
from wgrad.train.data.packing import BatchStream, Document
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.load_weights import load_frozen
from wgrad.train.model.model_files import SINGLE_FILE, ModelFiles, open_files
from wgrad.train.model.weights import weight_specs
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.step import build
from wgrad.train.step.trainer import Trainer

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # rows of whole blocks
LARGER = SIZES | {"hidden_size": 256, "num_hidden_layers": LAYERS}
VARIANTS = {
    Kind.F32: {"float32"},
    Kind.F16: {"float16"},
    None: {"float16", *({kind.format for kind in gguf_formats().values()} - {"tq1_0"})},
}
KINDS = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.MXFP4)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Callable[[Kinds], tuple[Path, Path]]:
    """Return checkpoints(kinds), which writes a GGUF file, and a folder in safetensors with its decoded values."""

    def make(kinds: Kinds) -> tuple[Path, Path]:
        config = tiny_config(**(LARGER if isinstance(kinds, dict) else SIZES))
        weights = random_weights(config)
        plain = write_checkpoint(tmp_path / "plain", config, restored(weights, kinds))
        folder = tmp_path / "gguf"
        shutil.copytree(plain, folder)
        (folder / SINGLE_FILE).unlink()
        write_gguf(folder / "model.gguf", weights, kinds)
        return folder, plain

    return make


@pytest.mark.parametrize("kinds", [*KINDS, ALL], ids=lambda kinds: getattr(kinds, "name", "all"))
def test_a_file_is_the_same_model(kinds: Kinds, checkpoints: Any) -> None:
    folder, plain = checkpoints(kinds)
    cpu, config = ReferenceDevice(), load_model_config(folder)
    found = load_frozen(folder, config, cpu)
    wanted = load_frozen(plain, config, cpu, quantize=False)
    seen = set()
    for spec in weight_specs(config):
        value, stored = found[spec.name], kind_of(spec.name, wanted[spec.name], kinds).name
        frozen = spec.kind == "projection" and stored in gguf_formats()
        assert isinstance(value, FrozenWeight) == frozen
        seen |= {value.gguf_type} if frozen else {str(value.dtype)}
        values = cpu.dequantize(value) if frozen else value.astype(np.float32)
        np.testing.assert_array_equal(values, wanted[spec.name], spec.name)
    assert kinds != ALL or seen == {*gguf_formats(), "float32", "float16", "bfloat16"}


@pytest.mark.parametrize("kinds", [ALL, Kind.F16], ids=["all", "F16"])
def test_a_step_is_that_of_the_restored_values(kinds: Kinds, checkpoints: Any, device: Device) -> None:
    folder, plain = checkpoints(kinds)
    documents = [Document(np.arange(i, i + 17, dtype=np.int32) % 40, np.ones(17, bool)) for i in range(4)]
    made = []
    for where, stored in ((folder, kinds), (plain, Kind.F32)):
        options: dict[str, Any] = {"lora_r": 3, "lora_alpha": 6.0, "max_length": 21, "batch_size": 2, "max_steps": 1}
        config = RunOptions(**options, compute="float32", quantize=stored != Kind.F32)
        built = build.build_trainable(config, load_model_config(where), where, device, positions=21)
        assert built.model.variants == VARIANTS[stored if isinstance(stored, Kind) else None]
        trainer = Trainer(built.model, build.build_optimizer(config, built.parameters), config)
        for step in BatchStream(documents, config):
            trainer.step(step, 5e-3)
        made.append((trainer.read_history()[0, 0], {n: built.parameters.get(n) for n in built.parameters.tensors}))
    (loss, found), (plain_loss, wanted) = made
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    for part, value in wanted.items():
        np.testing.assert_allclose(found[part], value, rtol=1e-4, atol=1e-6, err_msg=part)


def test_a_scale_that_is_not_finite_is_refused(checkpoints: Any) -> None:
    folder, _ = checkpoints(Kind.Q8_0)
    path = folder / "model.gguf"
    data = bytearray(path.read_bytes())
    (at,) = (t.data_offset for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_down.weight")
    data[at + 34 : at + 36] = b"\x00\x7c"  # of the second block
    path.write_bytes(data)
    with pytest.raises(WgradError, match=r"mlp.down_proj.weight in .*model.gguf has values that are not finite"):
        load_frozen(folder, load_model_config(folder), ReferenceDevice())


def test_the_digest_is_of_the_contents(checkpoints: Any, tmp_path: Path) -> None:
    folder, _ = checkpoints(Kind.F32)
    before = ModelFiles(folder).digest()
    weights = random_weights(tiny_config(**SIZES))
    weights["model.norm.weight"][3] += 1
    write_gguf(folder / "model.gguf", weights, Kind.F32)
    assert ModelFiles(folder).digest() != before


def with_alignment(path: Path, weights: dict[str, np.ndarray], value: int, kind: gguf.GGUFValueType) -> None:
    """A file whose key says so, and whose tensors begin at multiples of 32."""
    write_gguf(path, weights, Kind.Q4_1)
    data = path.read_bytes()
    key = b"general.alignment"
    number = value.to_bytes(8 if kind == gguf.GGUFValueType.UINT64 else 4, "little")
    entry = len(key).to_bytes(8, "little") + key + int(kind).to_bytes(4, "little") + number
    keys = int.from_bytes(data[16:24], "little")
    path.write_bytes(data[:16] + (keys + 1).to_bytes(8, "little") + entry + data[24:])


@pytest.mark.parametrize("alignment", [1, 2, 8, 32, 64, 4096])
def test_tensors_begin_at_multiples_of_the_alignment(alignment: int, checkpoints: Any, device: Device) -> None:
    folder, plain = checkpoints(Kind.Q4_1)
    config, path = load_model_config(folder), folder / "model.gguf"
    write_gguf(path, random_weights(tiny_config(**SIZES)), Kind.Q4_1, alignment=alignment)
    found = load_frozen(folder, config, device)
    wanted = load_frozen(plain, config, ReferenceDevice(), quantize=False)
    for name, value in found.items():
        values = device.dequantize(value) if isinstance(value, FrozenWeight) else value
        np.testing.assert_array_equal(device.download(values).astype(np.float32), wanted[name], name)


@pytest.mark.parametrize("alignment", [0, 3, 48, 2**32 - 1, 2**31])
def test_an_alignment_that_cannot_be_is_refused(alignment: int, checkpoints: Any) -> None:
    folder, _ = checkpoints(Kind.F32)
    with_alignment(folder / "model.gguf", random_weights(tiny_config(**SIZES)), alignment, gguf.GGUFValueType.UINT32)
    with pytest.raises(WgradError, match="model.gguf is cut off or damaged"):
        ModelFiles(folder)


@pytest.mark.parametrize("kind", ["UINT64", "INT32", "FLOAT32", "BOOL", "STRING"])
def test_an_alignment_of_another_type_is_refused(kind: str, checkpoints: Any) -> None:
    folder, _ = checkpoints(Kind.F32)
    with_alignment(folder / "model.gguf", random_weights(tiny_config(**SIZES)), 32, gguf.GGUFValueType[kind])
    with pytest.raises(WgradError, match="model.gguf is cut off or damaged"):
        ModelFiles(folder)


def test_types_that_are_not_read_are_listed(checkpoints: Any) -> None:
    folder, _ = checkpoints(Kind.Q4_0)
    path = folder / "model.gguf"
    data = bytearray(path.read_bytes())
    for name, kind in ((b"blk.0.attn_k.weight", Kind.Q8_1), (b"blk.1.attn_k.weight", Kind.Q8_1),
                       (b"blk.1.ffn_up.weight", Kind.I16)):  # fmt: skip
        place = data.index(name) + len(name) + 4 + 2 * 8
        data[place : place + 4] = int(kind).to_bytes(4, "little")
    path.write_bytes(data)
    message = r"has tensors of types that are not read: I16 \(1\), Q8_1 \(2\).* F32, F16, BF16, IQ1_M, .*, Q4_0, Q4_1, "
    with pytest.raises(WgradError, match=message):
        ModelFiles(folder)


def refuse_model(folder: Path, message: str) -> None:
    with pytest.raises(WgradError, match=message) as caught:
        ModelFiles(folder).check(load_model_config(folder))
    assert "\n" not in str(caught.value)


def test_a_damaged_file_is_refused(checkpoints: Any) -> None:
    folder, _ = checkpoints(Kind.F32)
    path, refused = folder / "model.gguf", partial(refuse_model, folder)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused(r"model.gguf is cut off or damaged \(.*\): fetch the file again")
    for size, byte in ((7, 4), (23, 8)):  # within the version, within a count
        path.write_bytes(whole[:size])
        refused(
            f"model.gguf is cut off or damaged .[12] numbers at byte {byte} go beyond its end.: fetch the file again"
        )
    path.write_bytes(b"not one" + whole)
    refused("model.gguf is cut off or damaged .GGUF magic invalid.")
    name = b"blk.0.attn_k.weight"
    place = whole.index(name) + len(name) + 4 + 2 * 8 + 4  # dimensions, type
    path.write_bytes(whole[:place] + bytes(8) + whole[place + 8 :])
    refused(
        "blk.0.attn_k.weight must begin at byte [0-9]+, after the tensor before it, got [0-9]+: fetch the file again"
    )
    path.write_bytes(whole.replace(name, b"blk.0.attn_k\nweight"))
    refused("has no tensor model.layers.0.self_attn.k_proj.weight")
    path.write_bytes(whole[: place - 4] + (99).to_bytes(4, "little") + whole[place:])
    refused("model.gguf has a tensor of type 99, which the gguf package does not know: use a file in another format")
    head = whole[:16] + (1).to_bytes(8, "little") + (1).to_bytes(8, "little") + b"a" + (9).to_bytes(4, "little")
    for kind, claimed in (
        (9, 1),
        (8, 2**60),
        (4, 2**60),
    ):  # arrays in arrays; more strings, more numbers than there are
        path.write_bytes(head + (kind.to_bytes(4, "little") + claimed.to_bytes(8, "little")) * 3000)
        refused("model.gguf is cut off or damaged")


def test_a_model_of_another_kind_is_refused(checkpoints: Any) -> None:
    folder, _ = checkpoints(Kind.F32)
    path, refused = folder / "model.gguf", partial(refuse_model, folder)
    whole = path.read_bytes()
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_block_count(1)
    writer.add_token_list(["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    refused("has its numbers in the other byte order")
    path.write_bytes(whole[:4] + (1).to_bytes(4, "little") + whole[8:])
    refused("model.gguf has version 1 of the GGUF format, of which 2 and 3 are read: convert the model again")
    path.write_bytes(whole[:4] + (2).to_bytes(4, "little") + whole[8:])
    ModelFiles(folder).check(load_model_config(folder))
    write_gguf(path, random_weights(tiny_config(**SIZES)), Kind.F32, "grok")
    refused("general.architecture 'grok' is not read from GGUF: use .* or one of the [0-9]+ architectures")
    path.write_bytes(whole)
    writer = gguf.GGUFWriter(path, "llama")
    del writer.kv_data[0]["general.architecture"]
    writer.add_array("general.architecture", [1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    refused(r"general.architecture \[1\] is not read")


def test_a_folder_of_one_model_is_read(checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shapes are those of config.json, it has one file, and reading takes the package gguf."""
    folder, _ = checkpoints(Kind.F32)
    path, refused = folder / "model.gguf", partial(refuse_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    refused(r"mlp.gate_proj.weight in .*model.gguf has shape \[96, 64\]: config.json asks for \[128, 64\]")
    shutil.copy(path, folder / "second.gguf")
    refused(r"must have one .gguf model, got 2 \(model.gguf, second.gguf\)")
    (folder / "second.gguf").unlink()
    plain = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    refused(r"takes a package: pip install 'wgrad\[gguf\]'")


def test_tensors_that_the_model_does_not_use_are_listed(checkpoints: Any) -> None:
    """By the names that they have here; factors of rotary embeddings belong to a file."""
    folder, _ = checkpoints(Kind.F16)
    weights = random_weights(tiny_config(**SIZES)) | {"rope_freqs.weight": np.ones(8, np.float32)}
    write_gguf(folder / "model.gguf", weights, Kind.F16)
    open_files(folder, load_model_config(folder))
    extra = {"blk.1.attn_q.bias": np.ones(64, np.float32), "blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    write_gguf(folder / "model.gguf", weights | extra, Kind.F16)
    with pytest.raises(
        WgradError, match=r"2 tensors that Llama.*: model.layers.1.self_attn.q_proj.bias, blk.0.attn_si"
    ):
        open_files(folder, load_model_config(folder))
