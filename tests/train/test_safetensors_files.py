"""safetensors files: what a header may say, what is read of a tensor, and that both ways of writing give the format."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from wgrad.device.errors import WgradError
from wgrad.train.files.safetensors_files import from_arrays, read_entries, save_arrays, write_safetensors


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def tensor(shape: Any, begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HOSTILE: dict[str, tuple[Any, ...]] = {
    "an empty header": (b"",),
    "no object": (b"[1]",),
    "not JSON": (b"this is not json", bytes(64)),
    "not UTF-8": (b'{"\xff":1}',),
    "half a surrogate pair": (b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
    "deep nesting": (b'{"a":' + b"[" * 100_000,),
    "a length beyond the file": ({}, b"", 1000),
    "a length beyond memory": ({}, b"", 2**63),
    "a hole": ({"a": tensor([1], 4, 8)}, bytes(8)),
    "an overlap": ({"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)}, bytes(12)),
    "the same bytes twice": ({"a": tensor([2], 0, 8), "b": tensor([2], 0, 8)}, bytes(8)),
    "beyond the file": ({"a": tensor([4], 0, 16)}, bytes(8)),
    "bytes of no tensor": ({"a": tensor([1], 0, 4)}, bytes(8)),
    "offsets in reverse": ({"a": tensor([1], 4, 0)}, bytes(4)),
    "a negative offset": ({"a": tensor([1], -4, 0)}, bytes(4)),
    "a huge offset": ({"a": tensor([1], 2**63, 2**63 + 4)}, bytes(4)),
    "another size": ({"a": tensor([4], 0, 8)}, bytes(8)),
    "a negative dimension": ({"a": tensor([-1], 0, 4)}, bytes(4)),
    "a product beyond 64 bits": ({"a": tensor([2**62, 2**62], 0, 4)}, bytes(4)),
    "a product that wraps to the size": ({"a": tensor([2**62, 4], 0, 0)}, b""),
    "a dimension beyond 64 bits": ({"a": tensor([2**70], 0, 4)}, bytes(4)),
    "a fraction": ({"a": tensor([1.5], 0, 4)}, bytes(4)),
    "text for a shape": ({"a": tensor("1", 0, 4)}, bytes(4)),
    "null for a shape": ({"a": tensor(None, 0, 4)}, bytes(4)),
    "an unknown dtype": ({"a": tensor([4], 0, 4, "Q4")}, bytes(4)),
    "a number for a dtype": ({"a": tensor([4], 0, 4, 3)}, bytes(4)),
    "no offsets": ({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)),
    "three offsets": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}}, bytes(4)),
    "a tensor that is a list": ({"a": [1, 2]}, bytes(4)),
    "a number as metadata": ({"__metadata__": {"a": 3}},),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_header_that_cannot_be_is_refused(case: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", *HOSTILE[case])
    with pytest.raises(
        WgradError, match=r"^--model: .*a.safetensors is cut off or damaged \(.*\): fetch the file"
    ) as e:
        read_entries(path, "--model")
    assert "\n" not in str(e.value) and len(str(e.value)) < 600


@pytest.mark.parametrize(
    "header, data, message",
    [
        ({"a": tensor([0, 2**62], 0, 0)}, b"", "cut off or damaged"),  # NumPy has no such shape
        ({"a": tensor([1] * 100, 0, 4)}, bytes(4), "cut off or damaged"),
        ({"a": tensor([4], 0, 4, "F8_E4M3")}, bytes(4), r"--model: a in .* is F8_E4M3: only F64, F32"),
    ],
)
def test_a_tensor_that_numpy_cannot_hold_is_refused_when_it_is_read(
    header: Any, data: bytes, message: str, tmp_path: Path
) -> None:
    entry = read_entries(write(tmp_path / "a.safetensors", header, data), "--model")["a"]
    with pytest.raises(WgradError, match=message):
        entry.array()


def test_a_file_cut_off_after_it_was_opened_is_an_error(tmp_path: Path) -> None:
    """An error, where a mapped file would end the process."""
    save_arrays(tmp_path / "a", {"x": np.ones(100_000, np.float32)})
    entry = read_entries(tmp_path / "a", "--model")["x"]
    os.truncate(tmp_path / "a", 4096)
    with pytest.raises(WgradError, match=r"--model: .*a is cut off or damaged \(.*\): fetch the file again"):
        entry.array()


@pytest.mark.skipif(os.name == "nt", reason="named pipes of Windows are no files in folders")
def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "pointer").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n")
    for name, message in (("pipe", "named pipe"), ("", "a folder"), ("none", "no such file"), ("pointer", "git lfs")):
        found: list[str] = []

        def read(name: str = name, found: list[str] = found) -> None:
            with pytest.raises(WgradError) as caught:
                read_entries(tmp_path / name, "--model")
            found.append(str(caught.value))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        thread.join(60)
        assert found and message in found[0], name


ARRAYS: dict[str, np.ndarray] = {
    "scalar": np.array(3.5, np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "half": np.arange(7).astype(np.float16),
    "brain": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
    "bytes": np.arange(9, dtype=np.uint8),
    "wide": np.arange(5000 * 33, dtype=np.float32).reshape(5000, 33),
    "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "text \u00e9 \U0001f600": np.ones(2, np.int64),
}


@pytest.mark.parametrize("way", ["save_arrays", "write_safetensors"])
def test_both_ways_of_writing_give_the_format(way: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    if way == "save_arrays":
        save_arrays(path, ARRAYS)
    else:
        write_safetensors(path, from_arrays({n: a for n, a in ARRAYS.items() if a.ndim}))
    theirs, ours = load_file(path), read_entries(path, "--model")
    assert os.listdir(tmp_path) == ["a.safetensors"]
    assert set(theirs) == set(ours) == {n for n, a in ARRAYS.items() if a.ndim or way == "save_arrays"}
    for name, entry in ours.items():
        for got in (theirs[name], entry.array()):
            assert got.dtype == ARRAYS[name].dtype and got.shape == ARRAYS[name].shape
            np.testing.assert_array_equal(got, ARRAYS[name])
        assert entry.nbytes == ARRAYS[name].nbytes
    np.testing.assert_array_equal(np.concatenate(list(ours["wide"].blocks(1024))), ARRAYS["wide"])


def test_samples_begin_and_end_the_tensor_and_stay_small(tmp_path: Path) -> None:
    save_arrays(tmp_path / "a", ARRAYS | {"flat": np.arange(10_000, dtype=np.int32)})
    entries = read_entries(tmp_path / "a", "--model")
    for name in ("wide", "flat"):
        data, blocks = np.ascontiguousarray((ARRAYS | {"flat": np.arange(10_000, dtype=np.int32)})[name]).tobytes(), []
        blocks = entries[name].sample(4, 4096)
        assert len(blocks) == 4 and all(2048 < len(b) <= 4096 for b in blocks) and len(set(blocks)) == 4
        assert data.startswith(blocks[0]) and data.endswith(blocks[3]) and all(b in data for b in blocks)
    for name in ("scalar", "empty", "half"):
        assert entries[name].sample(4, 4096) == [ARRAYS[name].tobytes()]


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    save_arrays(tmp_path / "a", {"x": np.ones(1, np.float32)})
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode
