"""`--imatrix`: what it sums up, llama.cpp's file, and a model that is quantized by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from tests.train.conftest import SENTENCES, random_weights, tiny_config, write_checkpoint
from tests.train.peft_oracle import random_adapter
from tests.train.test_gguf_quantize import theirs, types_of
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.errors import WgradError
from wgrad.train.commands.cli import main
from wgrad.train.commands.importance import Squares, by_gguf_names
from wgrad.train.data.packing import Document
from wgrad.train.files.imatrix_file import IMATRIX_FILE, Imatrix, load_imatrix
from wgrad.train.model.adapter_files import save_adapter
from wgrad.train.model.load_config import load_model_config, parse_model_config
from wgrad.train.model.lora import LoraConfig, linear_modules
from wgrad.train.step.build import build_frozen

pytestmark = pytest.mark.oracle


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model of 8 layers, so that one of them is in the first eighth."""
    raw = tiny_config(hidden_size=256, intermediate_size=256, head_dim=64, num_hidden_layers=8)
    return write_checkpoint(tmp_path / "model", raw, random_weights(raw))


def document(*ids: int) -> Document:
    return Document(np.array(ids, np.int32), np.ones(len(ids), bool))


def test_means_are_those_of_the_tokens(make_checkpoint: Any) -> None:
    """Not of padding, and however documents are put into rows. The first layer's input is the norm of embeddings."""
    folder = make_checkpoint()
    built = build_frozen(load_model_config(folder), folder, ReferenceDevice(), positions=16)
    weights = {name: np.asarray(built.weights[name]) for name in ("model.embed_tokens.weight",)}
    texts = [document(5, 9, 11, 5), document(40, 3), document(7)]
    found = []
    for batches, size, length in (([[texts]], 2, 16), ([[[text] for text in texts[:2]], [texts[2:]]], 2, 8)):
        squares = Squares(built, size, length)
        for rows in batches:
            squares.add(rows)
        assert squares.tokens == 7
        found.append(squares.means())
    h = weights["model.embed_tokens.weight"][[5, 9, 11, 5, 40, 3, 7]].astype(np.float64)
    normed = h / np.sqrt((h**2).mean(axis=1, keepdims=True) + built.config.rms_norm_eps)
    normed *= np.asarray(built.weights["model.layers.0.input_layernorm.weight"])
    np.testing.assert_allclose(found[0]["model.layers.0.self_attn.k_proj"], (normed**2).mean(axis=0), rtol=1e-5)
    assert set(linear_modules(built.config)) <= set(found[0])
    for name, mean in found[0].items():
        np.testing.assert_allclose(found[1][name], mean, rtol=1e-4, err_msg=name)


def test_means_by_the_names_and_in_the_order_of_gguf() -> None:
    """Where heads of values lie in another order there, and where one weight is two tensors."""
    config, module = parse_model_config(tiny_config("Qwen3_5ForCausalLM")), "model.layers.0.linear_attn.out_proj"
    found = by_gguf_names(config, {module: np.arange(40)})
    np.testing.assert_array_equal(found["blk.0.ssm_out.weight"], np.arange(40).reshape(2, 2, 10).swapaxes(0, 1).ravel())
    config = parse_model_config(tiny_config("GraniteMoeHybridForCausalLM"))
    found = by_gguf_names(config, {"model.layers.1.shared_mlp.input_linear": np.ones(48)})
    assert found.keys() == {"blk.1.ffn_gate.weight", "blk.1.ffn_up.weight"}


def test_the_file_is_llama_cpps(tmp_path: Path) -> None:
    means = {"blk.0.attn_q.weight": np.array([1, 2.5, 0], np.float32), "blk.1.ffn_up.weight": np.ones(2, np.float32)}
    Imatrix(means, "data.jsonl", 8).save(path := tmp_path / "a.gguf")
    reader = gguf.GGUFReader(path)
    assert [t.name for t in reader.tensors][:2] == ["blk.0.attn_q.weight.in_sum2", "blk.0.attn_q.weight.counts"]
    assert [t.shape.tolist() for t in reader.tensors][:2] == [[3, 1], [1, 1]]
    assert reader.tensors[0].data.ravel().tolist() == [8, 20, 0] and reader.tensors[1].data.ravel().tolist() == [8]
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert fields == {
        "general.type": "imatrix",
        "imatrix.datasets": ["data.jsonl"],
        "imatrix.chunk_count": 1,
        "imatrix.chunk_size": 8,
    }
    found = load_imatrix(path)
    assert found.means.keys() == means.keys() and found.source == "a.gguf"
    np.testing.assert_array_equal(found.means["blk.0.attn_q.weight"], means["blk.0.attn_q.weight"])
    with pytest.raises(WgradError, match="a.gguf has 3 columns of blk.0.attn_q.weight, and the model has 4"):
        found.of("blk.0.attn_q.weight", 4)
    before = path.read_bytes()
    with pytest.raises(UnicodeEncodeError):  # an interrupted write leaves the file of before, and no other
        Imatrix({**means, "\ud800": np.ones(2, np.float32)}, "", 1).save(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["a.gguf"]
    Imatrix({"x": np.array([np.nan], np.float32)}, "", 1).save(path)
    with pytest.raises(WgradError, match="is no importance matrix of llama.cpp"):
        load_imatrix(path)


def test_a_model_is_quantized_by_its_data(model: Path, tmp_path: Path, capsys: Any) -> None:
    """With llama.cpp's bits for the matrix that lies beside it, and the types that llama-quantize chooses with one."""
    data, adapter, out = tmp_path / "data.jsonl", tmp_path / "adapter", tmp_path / "out"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in SENTENCES))
    lora = LoraConfig(r=4, alpha=4.0, target_modules=r".*\.(q_proj|down_proj)")
    save_adapter(adapter, lora, random_adapter(lora, linear_modules(load_model_config(model))), str(model))
    words = ["merge", "--adapter", str(adapter), "--device", "cpu", "--onto", "original", "--format", "gguf"]
    words += ["--no-compare", "--quantize"]
    assert main([*words, "q4_0", "--imatrix", str(data), "--out", str(out)]) == 0, capsys.readouterr().err
    assert "importance matrix: 56 weights, by" in capsys.readouterr().err
    imatrix = load_imatrix(out / IMATRIX_FILE)
    assert main([*words, "none", "--out", str(tmp_path / "plain")]) == 0
    plain = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "plain/model.gguf").tensors}
    reader = gguf.GGUFReader(out / "model.gguf")
    kinds = {t.name: t.tensor_type for t in reader.tensors}
    assert [kinds[f"blk.{i}.ffn_down.weight"] for i in (0, 1)] == [Kind.Q4_1, Kind.Q4_0]
    assert reader.fields["quantize.imatrix.file"].contents() == IMATRIX_FILE
    weighted = 0
    for tensor in reader.tensors:
        if tensor.tensor_type == Kind.F32:
            continue
        importance = imatrix.of(tensor.name, tensor.shape[0].item())
        wanted = theirs(plain[tensor.name].astype(np.float32), tensor.tensor_type, importance)
        np.testing.assert_array_equal(tensor.data, wanted, tensor.name)
        weighted += importance is not None
    assert weighted == 56
    # The file serves again, and the folder is a model; what weighs nothing takes none.
    again = tmp_path / "again"
    assert main([*words, "q4_0", "--imatrix", str(out / IMATRIX_FILE), "--out", str(again)]) == 0
    assert gguf.GGUFReader(again / "model.gguf").tensors[3].data.tobytes() == reader.tensors[3].data.tobytes()
    assert load_model_config(out).num_hidden_layers == 8
    build_frozen(load_model_config(out), out, ReferenceDevice(), positions=8, quantize=False)
    capsys.readouterr()
    assert main([*words, "q8_0", "--imatrix", str(data), "--out", str(tmp_path / "more")]) == 2
    assert "--imatrix: would be ignored: --quantize q8_0 weighs no errors" in capsys.readouterr().err
    assert main([*words, "q4_0", "--imatrix", "run", "--out", str(tmp_path / "more")]) == 2
    assert "has no config.yaml that names its data" in capsys.readouterr().err


def test_a_matrix_changes_the_types_of_iq4_xs(tmp_path: Path) -> None:
    found = types_of("iq4_xs", tmp_path, num_hidden_layers=8, imatrix=Imatrix({}, ""))
    assert found["blk.0.ffn_down.weight"] == "IQ4_XS" and found["blk.0.attn_v.weight"] != "Q5_K"
