"""Tensors that are read piece by piece, ahead of the device: the same values, the same refusals."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from wgrad.device.contract import Device
from wgrad.device.errors import WgradError
from wgrad.train.files.safetensors_files import TensorEntry, from_arrays, read_entries, write_safetensors
from wgrad.train.model import read_ahead as module
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.load_weights import Loader, load_frozen
from wgrad.train.model.model_files import ModelFiles
from wgrad.train.model.read_ahead import pieces, read_ahead
from wgrad.train.model.weights import weight_specs


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 512)  # a view of a device begins at a multiple of 64 elements


def reading_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize(
    "family, dtype", [("Qwen2", "float32"), ("Qwen2", "float16"), ("Qwen2", "bfloat16"), ("Gemma", "float32")]
)
def test_values_are_those_of_whole_tensors(
    family: str, dtype: str, quantize: bool, make_checkpoint: Any, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma adds one to the norms of its files."""
    folder = make_checkpoint(f"{family}ForCausalLM", dtype=dtype, shards=3)
    config = load_model_config(folder)
    starts: list[int] = []
    into = TensorEntry.read_into

    def noted(entry: TensorEntry, out: np.ndarray, start: int) -> None:
        starts.append(start)
        into(entry, out, start)

    monkeypatch.setattr(TensorEntry, "read_into", noted)
    ahead = load_frozen(folder, config, device, quantize=quantize)
    as_they_lie = dtype != "float16" or device.float16
    assert (max(starts, default=0) > 0) == as_they_lie  # several pieces of a tensor
    assert reading_threads() == []
    monkeypatch.setattr(ModelFiles, "readable_ahead", lambda *_: None)
    whole = load_frozen(folder, config, device, quantize=quantize)
    for spec in weight_specs(config):
        arrays = [
            [w] if not hasattr(w, "packed") else [w.packed, w.absmax] for w in (ahead[spec.name], whole[spec.name])
        ]
        for one, other in zip(*arrays, strict=True):
            got, wanted = device.download(one), device.download(other)
            assert got.dtype == wanted.dtype
            np.testing.assert_array_equal(got.view(np.uint8), wanted.view(np.uint8))


def test_a_piece_stays_until_the_next_is_asked_for(tmp_path: Path) -> None:
    values = {name: np.arange(size, dtype=np.float32) + size for name, size in (("a", 1000), ("b", 1), ("c", 128))}
    write_safetensors(tmp_path / "m.safetensors", from_arrays(values))
    entries = read_entries(tmp_path / "m.safetensors", "--model")
    order = ["c", "a", "b"]  # not as they lie
    found = read_ahead((entries[name], np.dtype(np.float32)) for name in order)
    for name in order:
        for start, count in pieces(values[name].size, 4):
            np.testing.assert_array_equal(next(found), values[name][start : start + count])
    assert next(found, None) is None


def test_what_is_not_finite_is_refused_wherever_it_stands(make_checkpoint: Any, device: Device) -> None:
    folder = make_checkpoint()
    config = load_model_config(folder)
    name = "model.layers.1.mlp.down_proj.weight"
    entries = ModelFiles(folder).entries
    arrays = {n: np.array(entry.array()) for n, entry in entries.items()}
    arrays[name].reshape(-1)[-1] = np.nan
    write_safetensors(entries[name].path, from_arrays(arrays))
    with pytest.raises(WgradError, match=f"{name} in .* has values that are not finite"):
        load_frozen(folder, config, device)
    assert reading_threads() == []


def test_a_file_that_is_cut_off_meanwhile_is_an_error(make_checkpoint: Any, device: Device) -> None:
    folder = make_checkpoint()
    loader = Loader(folder, load_model_config(folder))
    path = next(iter(loader.files.entries.values())).path
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(WgradError, match="is cut off or damaged"):
        loader.all(device)
    assert reading_threads() == []


def test_a_type_of_unknown_size_leaves_the_places_behind_it_unknown(tmp_path: Path) -> None:
    """Its neighbors are read whole, through the package."""
    path = tmp_path / "m.safetensors"
    first, last = np.arange(8, dtype=np.float32), np.arange(4, dtype=np.float32)
    write_safetensors(path, from_arrays({"a": first, "b": np.zeros(8, ml_dtypes.bfloat16), "c": last}))
    data = path.read_bytes().replace(b'"dtype":"BF16","shape":[8]', b'"dtype":"F8_E5M2","shape":[16]')
    size = int.from_bytes(data[:8], "little") + len(data) - path.stat().st_size
    path.write_bytes(size.to_bytes(8, "little") + data[8:])
    entries = read_entries(path, "--model")
    assert [entries[n].begin is None for n in "abc"] == [False, False, True]
    assert entries["b"].dtype == "F8_E5M2"
    np.testing.assert_array_equal(entries["c"].array(), last)
    out = np.empty(8, np.float32)
    entries["a"].read_into(out, 0)
    np.testing.assert_array_equal(out, first)
