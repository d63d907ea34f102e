"""Loading checkpoints: tensors are streamed and quantized, and broken files refused with one clear line."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.train.nf4_writer import save_nf4_checkpoint
from tests.train.tiny_models import tiny_config
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.contract import Device
from wgrad.device.errors import WgradError
from wgrad.device.formats.nf4 import NF4Array
from wgrad.train.files import gguf_files, safetensors_files
from wgrad.train.files.safetensors_files import from_arrays, read_entries, write_safetensors
from wgrad.train.model.adapter_files import load_adapter, save_adapter
from wgrad.train.model.alibi import FURTHER
from wgrad.train.model.load_config import load_model_config, parse_model_config
from wgrad.train.model.load_weights import load_frozen
from wgrad.train.model.lora import LoraConfig, init_lora, linear_modules, lora_shapes
from wgrad.train.model.model_files import INDEX_FILE, SINGLE_FILE, ModelFiles, open_files, use_own_head
from wgrad.train.model.save_model import save_full
from wgrad.train.model.weights import EMBEDDING, HEAD, activation_bytes, attention_bytes, weight_specs
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.step.build import build_frozen, build_trainable


def file_arrays(folder: Path) -> dict[str, np.ndarray]:
    return {n: np.array(e.array()) for n, e in ModelFiles(folder).entries.items()}


def rewrite(folder: Path, **changes: Any) -> None:
    """Change tensors of a checkpoint in one file, or drop them (None). `__` stands for `.` in names."""
    arrays = file_arrays(folder)
    for name, value in changes.items():
        name = name.replace("__", ".")
        assert name in arrays
        if value is None:
            del arrays[name]
        else:
            arrays[name] = value
    write_safetensors(folder / SINGLE_FILE, from_arrays(arrays))


def test_a_single_file_comes_before_an_index(make_checkpoint: Any) -> None:
    """transformers, too, prefers the file if a folder has both."""
    folder = make_checkpoint()
    before = file_arrays(folder)
    other = {name: value * np.asarray(2, value.dtype) for name, value in before.items()}
    write_safetensors(folder / "model-00001-of-00001.safetensors", from_arrays(other))
    index = {"weight_map": dict.fromkeys(other, "model-00001-of-00001.safetensors")}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    for name, value in file_arrays(folder).items():
        np.testing.assert_array_equal(value, before[name])


# ---- what is read ------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_tensor_comes_from_its_shard_in_its_dtype(dtype: str, make_checkpoint: Any, device: Device) -> None:
    folder = make_checkpoint("Qwen2ForCausalLM", dtype=dtype, shards=3)
    config = load_model_config(folder)
    weights = load_frozen(folder, config, device, quantize=False)
    stored = file_arrays(folder)
    assert set(weights) == {s.name for s in weight_specs(config)} == set(stored)
    for spec in weight_specs(config):
        got, wanted = device.download(weights[spec.name]), stored[spec.name]
        kept = spec.kind not in ("norm", "bias") and (dtype != "float16" or device.float16)
        assert got.dtype == (wanted.dtype if kept else np.float32), spec.name
        np.testing.assert_array_equal(got.astype(np.float32), wanted.astype(np.float32))


@pytest.mark.parametrize("double", [False, True])
def test_projections_are_quantized_and_nothing_else(double: bool, make_checkpoint: Any, device: Device) -> None:
    folder = make_checkpoint("LlamaForCausalLM", dtype="bfloat16")
    weights = load_frozen(folder, load_model_config(folder), device, double_quant=double, block_size=32)
    stored = file_arrays(folder)
    for name, weight in weights.items():
        assert isinstance(weight, NF4Array) == name.endswith("_proj.weight"), name
        if isinstance(weight, NF4Array):
            assert weight.nested == double and weight.block_size == 32
            exact = stored[name].astype(np.float32)
            got = device.download(device.dequantize(weight))
            # NF4's widest gap is 0.31 of a block's largest value, so no value moves by more than half of that
            # (double quantization moves the scales too, by up to half of its own widest step).
            assert np.abs(got - exact).max() <= (0.2 if double else 0.16) * np.abs(exact).max()


def test_a_model_never_stands_in_memory_in_full_precision(make_checkpoint: Any) -> None:
    """The peak during loading is the quantized model and one tensor."""
    folder = make_checkpoint("LlamaForCausalLM", num_hidden_layers=8, vocab_size=300)
    device = ReferenceDevice()
    load_frozen(folder, load_model_config(folder), device)  # imports and tables
    device = ReferenceDevice()
    weights = load_frozen(folder, load_model_config(folder), device)
    memory = device.memory()
    full = sum(a.nbytes for a in file_arrays(folder).values())
    largest = max(a.nbytes for n, a in file_arrays(folder).items() if n.endswith("_proj.weight"))
    assert len(weights) > 50
    assert memory.peak_bytes <= memory.in_use_bytes + 4 * largest < full


def test_a_quantized_checkpoint_is_read_back_to_the_same_bits(
    make_checkpoint: Any, device: Device, tmp_path: Path
) -> None:
    for double in (False, True):
        folder = make_checkpoint("Qwen3ForCausalLM")
        weights = load_frozen(folder, load_model_config(folder), device, double_quant=double)
        raw = json.loads((folder / "config.json").read_text())
        out = tmp_path / f"nf4-{double}"
        save_nf4_checkpoint(out, raw, weights, device)
        config = load_model_config(out)
        assert config.quantization is not None and config.quantization.bnb_4bit_use_double_quant == double
        again = load_frozen(out, config, device)
        for name, weight in weights.items():
            if isinstance(weight, NF4Array):
                got, wanted = (device.download(device.dequantize(w)) for w in (again[name], weight))
            else:
                got, wanted = device.download(again[name]), device.download(weight)
            np.testing.assert_array_equal(got, wanted)


def test_safetensors_files_are_those_of_the_reference_implementation(tmp_path: Path) -> None:
    numpy_files = pytest.importorskip("safetensors.numpy")
    generator = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {
        "a": generator.standard_normal((3, 5)).astype(np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "half": generator.standard_normal(7).astype(np.float16),
        "bytes": generator.integers(0, 255, 9).astype(np.uint8),
        "brain": generator.standard_normal((2, 3)).astype(ml_dtypes.bfloat16),
    }
    write_safetensors(tmp_path / "ours.safetensors", from_arrays(arrays))
    theirs = numpy_files.load_file(tmp_path / "ours.safetensors")
    numpy_files.save_file({n: a for n, a in arrays.items() if n != "brain"}, tmp_path / "theirs.safetensors")
    ours = read_entries(tmp_path / "theirs.safetensors", "--model")
    assert set(theirs) == set(arrays) and set(ours) == set(arrays) - {"brain"}
    for name, entry in ours.items():
        np.testing.assert_array_equal(entry.array(), arrays[name])
    for name, array in arrays.items():
        assert theirs[name].shape == array.shape
        np.testing.assert_array_equal(theirs[name].astype(np.float32), array.astype(np.float32))


@pytest.mark.parametrize("part", ["first", "last", "between"])
def test_the_digest_is_of_contents_not_of_places(part: str, make_checkpoint: Any, tmp_path: Path) -> None:
    """Other weights of the same shapes change the digest; other shards of the same weights do not."""
    folder, shards = make_checkpoint(), make_checkpoint(shards=3, name="shards")
    digest = ModelFiles(folder).digest()
    assert digest == ModelFiles(shards).digest() == ModelFiles(folder).digest()
    name = "model.layers.1.mlp.up_proj.weight"
    entry = ModelFiles(folder).entries[name]
    assert entry.nbytes > 16384
    place = {"first": 0, "last": -1, "between": (entry.nbytes - 4096) // 3}[part]
    value = file_arrays(folder)[name]
    value.reshape(-1).view(np.uint8)[place] ^= 1
    rewrite(folder, **{name.replace(".", "__"): value})
    assert ModelFiles(folder).digest() != digest
    for dtype in ("bfloat16", "float16"):
        assert ModelFiles(make_checkpoint(dtype=dtype, name=dtype)).digest() != digest


def test_a_whole_checkpoint_says_whether_its_head_is_tied(make_checkpoint: Any, tmp_path: Path) -> None:
    """config.json of a base may tie a head that has other values."""
    for name, own in (("own", True), ("tied", False)):
        folder, device = make_checkpoint(name=name, tie_word_embeddings=not own), ReferenceDevice()
        raw = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
        (folder / "config.json").write_text(json.dumps(raw))
        config, note = use_own_head(load_model_config(folder), ModelFiles(folder))
        assert bool(note) == own
        built = build_trainable(RunOptions(full=True), config, folder, device, positions=8)
        save_full(tmp_path, folder, built.parameters.tensors, config, lambda out: None)
        assert load_model_config(tmp_path).tie_word_embeddings != own
        assert use_own_head(load_model_config(tmp_path), ModelFiles(tmp_path))[1] == ""
        saved, stored = file_arrays(tmp_path), file_arrays(folder)
        assert ("lm_head.weight" in saved) == own and all(np.array_equal(saved[n], stored[n]) for n in saved)


@pytest.mark.parametrize("embedding", ["backbone.embeddings", "model.embeddings"])
def test_a_head_of_its_own_stays_untied(embedding: str, make_checkpoint: Any) -> None:
    """Nemotron-H's files give the embedding another name, and transformers never ties its head."""
    folder = make_checkpoint("NemotronHForCausalLM")
    arrays = file_arrays(folder)
    table = arrays.pop("model.embeddings.weight")
    write_safetensors(folder / "model.safetensors", from_arrays(arrays | {f"{embedding}.weight": table}))
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    files, config, note = open_files(folder, load_model_config(folder))
    assert "not tied" in note and not config.tie_word_embeddings
    assert np.array_equal(files.entries["model.embed_tokens.weight"].array(), table)


def test_pythias_published_files_are_read_and_written(make_checkpoint: Any, tmp_path: Path) -> None:
    """Their head has another name than in transformers 5, and they have masks and frequencies."""
    folder, device = make_checkpoint("GPTNeoXForCausalLM"), ReferenceDevice()
    arrays = file_arrays(folder)
    arrays["embed_out.weight"] = arrays.pop("lm_head.weight")
    for layer in ("gpt_neox.layers.0.attention.", "gpt_neox.layers.1.attention."):
        arrays[f"{layer}bias"], arrays[f"{layer}masked_bias"] = (
            np.ones((1, 1, 8, 8), bool),
            np.full((), -1e9, np.float32),
        )
        arrays[f"{layer}rotary_emb.inv_freq"] = np.ones(3, np.float32)
    write_safetensors(folder / "model.safetensors", from_arrays(arrays))
    config = load_model_config(folder)
    built = build_trainable(RunOptions(full=True), config, folder, device, positions=8)
    save_full(tmp_path, folder, built.parameters.tensors, config, lambda out: None)
    saved = file_arrays(tmp_path)
    ignored = ("attention.bias", "masked_bias", "inv_freq")
    assert {*saved} == {name for name in arrays if not name.endswith(ignored)}
    assert all(np.array_equal(saved[name], arrays[name]) for name in saved)


@pytest.mark.parametrize(
    ("architecture", "beginning"), [("GPT2LMHeadModel", "transformer."), ("OPTForCausalLM", "model.")]
)
def test_published_files_of_gpt_2_and_opt_are_read_and_written(
    architecture: str, beginning: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    """Their names have no beginning, and GPT-2's have masks."""
    folder, device = make_checkpoint(architecture, tie_word_embeddings=True), ReferenceDevice()
    arrays = {name.removeprefix(beginning): value for name, value in file_arrays(folder).items()}
    layers = (0, 1) if architecture == "GPT2LMHeadModel" else ()
    masks = {f"h.{layer}.attn.bias": np.ones((1, 1, 8, 8), np.float32) for layer in layers}
    write_safetensors(folder / "model.safetensors", from_arrays(arrays | masks))
    config = load_model_config(folder)
    built = build_trainable(RunOptions(full=True, max_length=8), config, folder, device, positions=8)
    save_full(tmp_path, folder, built.parameters.tensors, config, lambda out: None)
    saved = file_arrays(tmp_path)
    assert {*saved} == {beginning + name for name in arrays}
    assert all(np.array_equal(saved[beginning + name], value) for name, value in arrays.items())


def test_a_sequence_beyond_the_embeddings_of_positions_is_refused(make_checkpoint: Any) -> None:
    folder, device = make_checkpoint("GPT2LMHeadModel", n_positions=40, max_position_embeddings=40), ReferenceDevice()
    config = load_model_config(folder)
    build_trainable(RunOptions(max_length=40), config, folder, device, positions=8)
    with pytest.raises(WgradError, match="sequences of 41 tokens are longer than the 40 positions .*: use at most 40"):
        build_trainable(RunOptions(max_length=40), config, folder, device, positions=41)


# ---- what is refused ---------------------------------------------------------------------------
def load(folder: Path) -> None:
    load_frozen(folder, load_model_config(folder), ReferenceDevice())


def test_a_folder_without_weights_is_refused(make_checkpoint: Any) -> None:
    folder = make_checkpoint()
    (folder / SINGLE_FILE).unlink()
    with pytest.raises(WgradError, match="has neither .* nor a .gguf file: fetch it"):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(WgradError, match="pytorch_model.bin is of another format: convert it to safetensors with"):
        load(folder)


def test_a_missing_shard_is_named(make_checkpoint: Any) -> None:
    folder = make_checkpoint(shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WgradError, match=r"lacks 1 of 3 shards \(model-00002-of-00003.safetensors\)"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 5, 40, -1, -100])
def test_a_truncated_shard_is_named(keep: int, make_checkpoint: Any) -> None:
    folder = make_checkpoint(shards=2)
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WgradError, match=r"model-00002-of-00002.safetensors is cut off.*fetch the file again"):
        load(folder)


def test_a_file_of_another_format_is_refused(make_checkpoint: Any) -> None:
    folder = make_checkpoint()
    (folder / SINGLE_FILE).write_bytes(b"\x10" + bytes(7) + b"this is not json" + bytes(64))
    with pytest.raises(
        WgradError, match=r"model.safetensors is cut off or damaged \(invalid JSON in header.*\): fetch"
    ):
        load(folder)
    header = b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,8]}}'
    (folder / SINGLE_FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(WgradError, match=r"is cut off or damaged \(invalid shape, data type, or offset"):
        load(folder)


def test_a_broken_index_is_refused(make_checkpoint: Any) -> None:
    folder = make_checkpoint(shards=2)
    (folder / INDEX_FILE).write_text('{"weight_map": 3}')
    with pytest.raises(WgradError, match="index.json: weight_map must be an object; got 3: fetch the file again"):
        load(folder)


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../other/model.safetensors", "a/../../b", "C:\\x", "\\\\server\\x", "..", "/", "a\\..\\..\\b"],
)
def test_an_index_that_leaves_its_folder_is_refused(name: str, make_checkpoint: Any) -> None:
    folder = make_checkpoint(shards=2)
    raw = json.loads((folder / INDEX_FILE).read_text())
    raw["weight_map"]["model.norm.weight"] = name
    (folder / INDEX_FILE).write_text(json.dumps(raw))
    with pytest.raises(WgradError, match="weight_map must name files within its folder; got .*: do not trust"):
        load(folder)


@pytest.mark.parametrize(
    "name, message",
    [
        ("", "is a folder: give a regular file"),
        (".", "is a folder: give a regular file"),
        ("a\0b", "has a NUL character"),
        ("n" * 300, "has 300 bytes: a name must have at most 255"),
        ("none", r"lacks 1 of 3 shards \(none\): fetch them"),
        ("config.json", "is cut off or damaged"),
    ],
)
def test_an_index_that_names_no_shard_is_refused(name: str, message: str, make_checkpoint: Any) -> None:
    folder = make_checkpoint(shards=2)
    raw = json.loads((folder / INDEX_FILE).read_text())
    raw["weight_map"]["model.norm.weight"] = name
    (folder / INDEX_FILE).write_text(json.dumps(raw))
    with pytest.raises(WgradError, match=message):
        load(folder)


def test_links_of_a_cache_are_followed(make_checkpoint: Any, tmp_path: Path) -> None:
    """The hub's cache holds links into another folder."""
    folder = make_checkpoint(shards=2)
    before = file_arrays(folder)
    (tmp_path / "blobs").mkdir()
    for shard in folder.glob("*.safetensors"):
        shard.rename(tmp_path / "blobs" / shard.name)
        shard.symlink_to(Path("..") / "blobs" / shard.name)
    after = file_arrays(folder)
    assert after.keys() == before.keys() and all(np.array_equal(after[name], before[name]) for name in before)


def test_pointers_of_git_lfs_are_recognized(make_checkpoint: Any) -> None:
    """A clone without Git LFS is such a folder."""
    folder = make_checkpoint(shards=2)
    for shard in folder.glob("*.safetensors"):
        shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(WgradError, match=rf"is a pointer of Git LFS.*: run 'git lfs pull' in {re.escape(str(folder))}"):
        load(folder)


def test_no_memory_is_taken_for_a_model_that_is_not_in_its_files(make_checkpoint: Any) -> None:
    """config.json asks for a model of terabytes, but nothing of that size is allocated before the files are checked."""
    folder = make_checkpoint()
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"hidden_size": 1 << 22, "num_hidden_layers": 1 << 12}))
    config = load_model_config(folder)
    with pytest.raises(WgradError, match=r"embed_tokens.weight .* has shape \[300, 48\]: config.json asks for"):
        ModelFiles(folder).check(config)
    with pytest.raises(WgradError, match="config.json asks for"):
        load_frozen(folder, config, ReferenceDevice())


def test_a_quantized_weight_of_another_size_is_told_before_it_is_read(make_checkpoint: Any, tmp_path: Path) -> None:
    device, folder = ReferenceDevice(), make_checkpoint()
    weights = load_frozen(folder, load_model_config(folder), device)
    save_nf4_checkpoint(tmp_path / "nf4", json.loads((folder / "config.json").read_text()), weights, device)
    config = dataclasses.replace(load_model_config(tmp_path / "nf4"), intermediate_size=90)
    ModelFiles(tmp_path / "nf4").check(load_model_config(tmp_path / "nf4"))
    with pytest.raises(WgradError, match=r"mlp.gate_proj.weight in .* must have 2160 bytes for \[90, 48\].*; got 2112"):
        ModelFiles(tmp_path / "nf4").check(config)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("full", [False, True])
def test_a_weight_that_is_not_finite_is_named(value: float, dtype: str, full: bool, make_checkpoint: Any) -> None:
    folder, device = make_checkpoint(dtype=dtype), ReferenceDevice()
    config = load_model_config(folder)
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"):
        good = file_arrays(folder)[name]
        bad = good.copy()
        bad.flat[-1] = value
        rewrite(folder, **{name: bad})
        with pytest.raises(
            WgradError, match=rf"^--model: {name} in {folder}/model.safetensors has values that are not f"
        ):
            build_trainable(RunOptions(full=full), config, folder, device, positions=8)
        rewrite(folder, **{name: good})
    build_trainable(RunOptions(full=full), config, folder, device, positions=8)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_finite_number_is_taken_and_no_other(dtype: Any, tmp_path: Path) -> None:
    """Check all bit patterns of 16 bits (also as upper halves of float32), and a bad one at each edge of a piece."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    numbers = bits.view(dtype) if np.dtype(dtype).itemsize == 2 else (bits.astype(np.uint32) << 16).view(np.float32)
    finite = np.isfinite(numbers.astype(np.float32))
    large = np.zeros((3, 1 << 17), dtype)
    path = tmp_path / "a.safetensors"

    def taken(array: np.ndarray) -> bool:
        write_safetensors(path, from_arrays({"a": array}))
        try:
            np.testing.assert_array_equal(read_entries(path, "--model")["a"].finite_array(), array)
        except WgradError as error:
            assert "--model: a in " in str(error)
            return False
        return True

    assert taken(numbers[finite]) and taken(np.zeros((0, 3), dtype)) and taken(large)
    assert not any(safetensors_files._is_finite(number[None]) for number in numbers[~finite])
    for place in (0, (1 << 17) - 1, 1 << 17, large.size - 1):
        bad = large.copy()
        bad.flat[place] = -np.inf
        assert not taken(bad)


def test_a_missing_tensor_is_named(make_checkpoint: Any) -> None:
    folder = make_checkpoint()
    rewrite(folder, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(WgradError, match="has no tensor model.layers.1.mlp.up_proj.weight"):
        load(folder)


def test_a_wrong_shape_says_both(make_checkpoint: Any) -> None:
    folder = make_checkpoint()
    rewrite(folder, model__norm__weight=np.ones(47, np.float32))
    with pytest.raises(WgradError, match=r"model.norm.weight .* has shape \[47\]: config.json asks for \[48\]"):
        load(folder)


@pytest.mark.parametrize("dtype, name", [(np.int8, "I8"), (np.float64, "F64"), (np.uint8, "U8")])
def test_a_wrong_dtype_says_which(dtype: Any, name: str, make_checkpoint: Any) -> None:
    folder = make_checkpoint()
    rewrite(folder, model__layers__0__self_attn__q_proj__weight=np.zeros((48, 48), dtype))
    with pytest.raises(WgradError, match=rf"q_proj.weight in .* is {name}: expected F32, F16, BF16"):
        load(folder)


@pytest.mark.parametrize(
    "part, value, message",
    [
        (".absmax", None, "lacks .*absmax"),
        (".absmax", np.zeros(3, np.float32), "3 scales"),
        (".absmax", np.zeros(66, np.uint8), r"has .absmax in U8, not in F32"),
        (".quant_map", np.zeros(3, np.float32), "code book that is not NF4"),
        (".quant_state.bitsandbytes__nf4", np.zeros(3, np.float32), "in F32, not in U8"),
        (".quant_map", np.linspace(-1, 1, 16, dtype=np.float32), "code book that is not NF4"),
        (".quant_state.bitsandbytes__nf4", np.frombuffer(b"{}", np.uint8), "bitsandbytes__nf4: blocksize is missing"),
        (".quant_state.bitsandbytes__nf4", None, "is U8: expected"),
    ],
)
def test_a_damaged_quantized_weight_is_refused(
    part: str, value: Any, message: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    device, folder = ReferenceDevice(), make_checkpoint()
    weights = load_frozen(folder, load_model_config(folder), device, double_quant=False)
    save_nf4_checkpoint(tmp_path / "nf4", json.loads((folder / "config.json").read_text()), weights, device)
    arrays = file_arrays(tmp_path / "nf4")
    name = "model.layers.0.mlp.up_proj.weight" + part
    arrays[name] = value
    write_safetensors(tmp_path / "nf4" / SINGLE_FILE, from_arrays({n: a for n, a in arrays.items() if a is not None}))
    with pytest.raises(WgradError, match=message):
        load(tmp_path / "nf4")


@pytest.mark.parametrize("part", [".absmax", ".nested_absmax", ".nested_quant_map"])
def test_a_quantized_weight_that_is_not_finite_is_named(part: str, make_checkpoint: Any, tmp_path: Path) -> None:
    device, folder = ReferenceDevice(), make_checkpoint()
    weights = load_frozen(folder, load_model_config(folder), device, double_quant=part != ".absmax")
    save_nf4_checkpoint(tmp_path / "nf4", json.loads((folder / "config.json").read_text()), weights, device)
    name = "model.layers.0.mlp.up_proj.weight" + part
    bad = file_arrays(tmp_path / "nf4")[name]
    bad[-1] = np.nan
    rewrite(tmp_path / "nf4", **{name: bad})
    with pytest.raises(
        WgradError, match=f"^--model: {name} in .*/nf4/model.safetensors has values that are not finite"
    ):
        load(tmp_path / "nf4")


# ---- tensors that the model does not use ---------------------------------------------------------
UNUSED: dict[str, dict[str, tuple[int, ...]]] = {
    "a bias": {"model.layers.1.self_attn.q_proj.bias": (48,)},
    "a further layer": {"model.layers.2.mlp.up_proj.weight": (88, 48), "model.layers.2.mlp.down_proj.weight": (48, 88)},
    "attention sinks": {"model.layers.0.self_attn.sinks": (4,)},
    "norms of heads": {f"model.layers.{i}.self_attn.{n}_norm.weight": (12,) for i in range(2) for n in "qk"},
    "a bias of the head": {"lm_head.bias": (300,)},
    "parts of a quantized weight": {"model.layers.0.mlp.up_proj.weight.absmax": (3,)},
    "images": {"vision_tower.layers.0.weight": (3, 3)},
    "many": {f"more.{i}": (1,) for i in range(20)},
}


def add(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    write_safetensors(folder / SINGLE_FILE, from_arrays(file_arrays(folder) | arrays))


@pytest.mark.parametrize("what", UNUSED)
def test_tensors_that_the_model_does_not_use_are_listed(what: str, make_checkpoint: Any) -> None:
    folder, names = make_checkpoint(), list(UNUSED[what])
    add(folder, {name: np.ones(shape, np.float32) for name, shape in UNUSED[what].items()})
    with pytest.raises(WgradError) as caught:
        open_files(folder, load_model_config(folder))
    listed = ", ".join(names) if len(names) < 9 else ", ".join(names[:8]) + " and 12 more"
    some = f"has {len(names)} tensor{'s' * (len(names) > 1)} that LlamaForCausalLM, as it is configured, does not use: "
    assert some + listed + ": " in str(caught.value)


def test_the_weights_of_another_family_are_not_taken_for_this_one(make_checkpoint: Any) -> None:
    folder = make_checkpoint("Qwen3ForCausalLM")
    raw = json.loads((folder / "config.json").read_text()) | {"model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(WgradError, match=r"has 4 tensors that LlamaForCausalLM.*layers.0.self_attn.q_norm.weight"):
        open_files(folder, load_model_config(folder))


def test_what_old_versions_left_in_files_is_not_used_and_not_refused(make_checkpoint: Any) -> None:
    folder = make_checkpoint(tie_word_embeddings=True)
    names = [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(2)] + [
        "model.rotary_emb.inv_freq",
        "mtp.norm.weight",
    ]
    add(folder, {name: np.ones(6, np.float32) for name in names} | {HEAD: file_arrays(folder)[EMBEDDING]})
    assert open_files(folder, load_model_config(folder))[1].tie_word_embeddings


def test_a_shared_expert_of_no_width_is_none(make_checkpoint: Any) -> None:
    """transformers writes its weights, which have no elements."""
    folder = make_checkpoint("DeepseekV3ForCausalLM", n_shared_experts=0)
    parts = {"gate_proj": (0, 48), "up_proj": (0, 48), "down_proj": (48, 0)}
    shared = {f"model.layers.1.mlp.shared_experts.{part}.weight": shape for part, shape in parts.items()}
    add(folder, {name: np.empty(shape, np.float32) for name, shape in shared.items()})
    assert shared.keys() <= open_files(folder, load_model_config(folder))[0].entries.keys()


def test_layers_that_predict_several_tokens_at_once_are_left_out(make_checkpoint: Any) -> None:
    """They are the last layers; config.json has their number."""
    for extra, number, fits in ((1, 2, True), (1, 3, False), (0, 2, False)):
        folder = make_checkpoint(name=f"{extra} {number}", num_nextn_predict_layers=extra)
        add(folder, {f"model.layers.{number}.eh_proj.weight": np.ones((48, 96), np.float32)})
        if fits:
            open_files(folder, load_model_config(folder))
            continue
        with pytest.raises(WgradError, match=rf"does not use: model.layers.{number}.eh_proj.weight"):
            open_files(folder, load_model_config(folder))


def test_a_tensor_by_two_names_is_refused(make_checkpoint: Any) -> None:
    folder = make_checkpoint()
    add(folder, {"language_model.model.norm.weight": np.ones(48, np.float32)})
    with pytest.raises(WgradError, match=r"has model.norm.weight twice, as .* in model.safetensors and as "):
        ModelFiles(folder)


@pytest.mark.parametrize("kind", ["safetensors", "adapter", "gguf"])
def test_a_header_is_parsed_once_a_file(
    kind: str, make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """This holds however many tensors are read, checked in blocks, or included in the digest."""
    folder = make_checkpoint(shards=3 if kind != "gguf" else 1, tie_word_embeddings=kind != "gguf")
    config, parsed = load_model_config(folder), []
    module, name = (gguf_files, "_reader_class") if kind == "gguf" else (safetensors_files, "safe_open")
    if kind == "gguf":
        write_gguf = pytest.importorskip("tests.train.gguf_writer", reason="needs the gguf package").write_gguf
        write_gguf(folder / "model.gguf", file_arrays(folder), pytest.importorskip("gguf").GGMLQuantizationType.F16)
        (folder / SINGLE_FILE).unlink()
    if kind == "adapter":
        lora = LoraConfig(r=2, alpha=4.0)
        save_adapter(tmp_path, lora, init_lora(lora_shapes(lora, linear_modules(config)), 0), "")
    plain = getattr(module, name)

    def counted(*args: Any, **options: Any) -> Any:
        parsed.append(args)
        return plain(*args, **options)

    monkeypatch.setattr(module, name, counted)
    if kind == "adapter":
        load_adapter(tmp_path, linear_modules(config))
    else:
        files, config, _ = open_files(folder, config)
        files.digest()
        for spec in weight_specs(config):
            files.read(spec)
            assert sum(len(block) for block in files.entries[spec.name].blocks(7)) == spec.shape[0]
    assert len(parsed) == (3 if kind == "safetensors" else 1)


def test_blocks_and_samples_are_those_of_the_whole_tensor(tmp_path: Path) -> None:
    arrays = {
        f"{shape}": np.random.default_rng(1).standard_normal(shape) for shape in [(5000,), (37, 211), (3, 41, 53)]
    }
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    write_safetensors(tmp_path / SINGLE_FILE, from_arrays(arrays))
    for name, entry in read_entries(tmp_path / SINGLE_FILE, "").items():
        whole = arrays[name].tobytes()
        np.testing.assert_array_equal(np.concatenate(list(entry.blocks(7))), arrays[name])
        blocks = entry.sample(4, 4096)
        assert len(blocks) == 4 and all(block in whole and 0 < len(block) <= 4096 for block in blocks)
        assert whole.startswith(blocks[0]) and whole.endswith(blocks[-1])
        assert entry.sample(1, len(whole)) == [whole]


@pytest.mark.parametrize("full", [False, True])
def test_loading_tells_how_many_tensors_are_there(make_checkpoint: Any, cpu: Device, full: bool) -> None:
    folder, told = make_checkpoint(), list[tuple[int, int]]()
    given: Any = load_model_config(folder), folder, cpu
    for build in (partial(build_trainable, RunOptions(max_length=8, full=full)), build_frozen)[: 2 - full]:
        build(*given, positions=8, progress=lambda done, count: told.append((done, count)))
    count = len(weight_specs(given[0]))
    assert told == [(done + 1, count) for done in range(count)] * (2 - full)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_an_adapter_goes_on_with_the_dropout_of_its_run(
    make_checkpoint: Any, cpu: Device, tmp_path: Path, dropout: float
) -> None:
    folder, lora = make_checkpoint(), LoraConfig(r=2, alpha=4.0, dropout=0.3)
    config = load_model_config(folder)
    save_adapter(tmp_path / "a", lora, init_lora(lora_shapes(lora, linear_modules(config)), 0), str(folder))
    options = RunOptions(max_length=8, adapter=str(tmp_path / "a"), lora_dropout=dropout)
    built = build_trainable(options, config, folder, cpu, positions=8)
    assert built.lora is not None and built.lora.dropout == dropout


def test_a_run_quantizes_as_its_options_say(make_checkpoint: Any, cpu: Device) -> None:
    folder = make_checkpoint()
    given: Any = load_model_config(folder), folder, cpu
    found = []
    for more in ({}, {"block_size": 128}, {"double_quant": False}, {"quantize": False}):
        options: dict[str, Any] = {"max_length": 8, **more}
        weights = build_trainable(RunOptions(**options), *given, positions=8).model.weights
        weight = weights["model.layers.0.mlp.down_proj.weight"]
        found.append((weight.block_size, weight.nested) if isinstance(weight, NF4Array) else None)
    assert found == [(64, True), (128, True), (64, False), None]


def test_attention_takes_memory_by_the_heads_of_each_layer() -> None:
    config = parse_model_config(tiny_config("LagunaForCausalLM"))
    assert config.heads == (4, 6)
    assert attention_bytes(config, 3, 2) == 3 * (4 + 6) * (2 * config.head_dim + 4)  # o in 16 bits, lse in 32
    jamba = parse_model_config(tiny_config("JambaForCausalLM", num_hidden_layers=4, attn_layer_period=4))
    assert attention_bytes(jamba, 3, 2) == 3 * 4 * (2 * jamba.head_dim + 4)  # one layer of four has attention
    alibi = {"multi_query": False, "new_decoder_architecture": False, "num_kv_heads": None}
    falcon, rotated = (parse_model_config(tiny_config("FalconForCausalLM", alibi=a, **alibi)) for a in (True, False))
    layers, heads = falcon.num_hidden_layers, 5 * falcon.num_attention_heads  # three times q's, twice k's
    assert activation_bytes(falcon, 3, 2) - activation_bytes(rotated, 3, 2) == 3 * layers * heads * FURTHER * 2
    assert attention_bytes(falcon, 3, 2) - attention_bytes(rotated, 3, 2) == 3 * layers * heads // 5 * FURTHER * 2
