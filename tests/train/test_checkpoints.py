"""A checkpoint is whole or it is not used: every bit of it, its name, its format."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from wgrad.device.errors import WgradError
from wgrad.device.files import write_json
from wgrad.train.output.checkpoints import FORMAT, INFO_FILE, STATE_FILE, Checkpoints, _sha256, _signed


def arrays_of(step: int) -> dict[str, np.ndarray]:
    return {"parameters": np.arange(40, dtype=np.float32) + step, "state": np.full(8, step, np.float32)}


INFO: dict[str, Any] = {
    "run": {"rank": 3, "target_modules": ["q_proj"], "alpha": 6.5},
    "data": "471a6dc37fe6cfdd",
    "results": {"held_out_loss_before": 7.2266891, "sample_before": "é → \\x03"},
    "schedule": {"steps": 24, "lr": 5e-3, "schedule": "cosine", "warmup": 0.03},
}


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"r": 3}')
    (folder / "adapter_model.safetensors").write_bytes(b"for people" * 9)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """step-2 and step-4, both whole."""
    for step in (2, 4):
        Checkpoints(tmp_path / "out").save(step, arrays_of(step), INFO, adapter)
    return tmp_path / "out"


def step_of(out: Path) -> int:
    """The step that is loaded; it is checked to be what was saved."""
    checkpoints = Checkpoints(out)
    state = checkpoints.load()
    assert state is not None and {k: v for k, v in msgspec.to_builtins(state.info).items() if k in INFO} == INFO
    for name, value in arrays_of(state.step).items():
        np.testing.assert_array_equal(state.arrays[name], value)
    assert [p.name for p in checkpoints.damaged] == (["step-4"] if state.step == 2 else [])
    return state.step


@pytest.mark.parametrize("name", [INFO_FILE, STATE_FILE, "adapter_config.json", "adapter_model.safetensors"])
def test_no_flipped_bit_is_taken(name: str, out: Path) -> None:
    """Each byte in turn, another bit each time: the one before is used, or (blanks of JSON) nothing has changed."""
    path = out / "checkpoints" / "step-4" / name
    good = path.read_bytes()
    same = 0
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
        same += step_of(out) == 4
    blanks = good.count(b" ") + good.count(b"\n")
    assert same <= (blanks if name == INFO_FILE else 0)


def test_every_cut_is_noticed(out: Path) -> None:
    path = out / "checkpoints" / "step-4" / INFO_FILE
    good = path.read_bytes()
    for length in range(0, len(good) - 1, 7):
        path.write_bytes(good[:length])
        assert step_of(out) == 2


@pytest.mark.parametrize(
    "contents",
    [b"", b"null", b"[]", b"{}", b'{"format": 2}', b'{"format": 2, "step": 4, "files": 3, "digest": "x"}']
    + [b"[" * 100_000, b"\xff\xfe", b'{"format": 1, "sha256": "x"}', b'{"format": 99, "digest": "x"}'],
    ids=range(10),
)
def test_anything_in_its_place_is_noticed(contents: bytes, out: Path) -> None:
    (out / "checkpoints" / "step-4" / INFO_FILE).write_bytes(contents)
    assert step_of(out) == 2


def wrongly_typed() -> Iterator[dict[str, Any]]:
    """Records with one value of another type each."""
    values: dict[str, list[Any]] = {
        "step": [None, "4", True, -1, 10**400],
        "files": [None, [], 3, {}, {"../x": "y"}, {STATE_FILE: 3}],
        "run": [None, [], "x", 4],
        "data": [None, 3, ["x"]],
        "results": [None, [], "x", {"seconds": "x"}, {"seconds": -1}, {"held_out_loss_before": "x"}]
        + [{"sample_before": 3}, {"more": []}, {"held_out_loss_before": 10**400}],
        "schedule": ["x", [], {}, {"steps": "x"}, {"steps": 3, "lr": None}, {"steps": 3, "schedule": 4}],
        "shares": [None, [1.0], "x", {"x": 1.0}, {"0": "x"}, {"0": -1}, {"0": 1e300}],
        "held_out": [None, {}, 3, [3], [[1]], [["x", 1.0]], [[1, "x"]], [[1.5, 1.0]], [[1, 2.0, 3]]],
    }
    return ({key: value} for key, wrong in values.items() for value in wrong)


@pytest.mark.parametrize("wrong", list(wrongly_typed()), ids=str)
def test_a_wrong_type_is_noticed_though_the_digest_is_right(wrong: dict[str, Any], out: Path) -> None:
    path = out / "checkpoints" / "step-4" / INFO_FILE
    write_json(path, _signed(json.loads(path.read_text()) | wrong))
    assert step_of(out) == 2
    checkpoints = Checkpoints(out)
    checkpoints.load()
    (reason,) = checkpoints.damaged.values()
    assert reason.startswith("trainer.json: ") or wrong in ({"files": {}}, {"files": {"../x": "y"}}), reason


@pytest.mark.parametrize("key", ["run", "data", "results", "schedule", "shares", "held_out"])
def test_a_checkpoint_that_lacks_a_key_is_read(key: str, out: Path) -> None:
    """Earlier versions wrote fewer keys."""
    path = out / "checkpoints" / "step-4" / INFO_FILE
    write_json(path, _signed({k: v for k, v in json.loads(path.read_text()).items() if k != key}))
    state = Checkpoints(out).load()
    assert state is not None and state.step == 4


def test_a_state_that_is_no_such_file_is_noticed(out: Path) -> None:
    folder = out / "checkpoints" / "step-4"
    (folder / STATE_FILE).write_bytes(b"?" * 99)
    record = json.loads((folder / INFO_FILE).read_text())
    record["files"][STATE_FILE] = _sha256(folder / STATE_FILE)
    write_json(folder / INFO_FILE, _signed(record))
    assert step_of(out) == 2


def test_a_missing_file_and_another_name_are_noticed(out: Path) -> None:
    newest = out / "checkpoints" / "step-4"
    shutil.copytree(newest, out / "copy")
    newest.rename(out / "checkpoints" / "step-9")  # it holds step 4
    checkpoints = Checkpoints(out)
    state = checkpoints.load()
    assert state is not None and state.step == 2
    assert checkpoints.damaged == {out / "checkpoints" / "step-9": "it holds step 4"}
    shutil.rmtree(out / "checkpoints" / "step-9")
    for name in (INFO_FILE, STATE_FILE, "adapter_model.safetensors"):
        shutil.rmtree(newest, ignore_errors=True)
        shutil.copytree(out / "copy", newest)
        (newest / name).unlink()
        assert step_of(out) == 2
    (newest / STATE_FILE).unlink()
    assert Checkpoints(out).saved() == out / "checkpoints" / "step-2"
    (out / "checkpoints" / "step-99").mkdir()
    assert Checkpoints(out).saved() == out / "checkpoints" / "step-2"


def test_damaged_ones_stay_until_a_newer_one_is_whole(out: Path) -> None:
    (out / "checkpoints" / "step-4" / STATE_FILE).write_bytes(b"?")
    checkpoints = Checkpoints(out)
    checkpoints.load()
    assert (out / "checkpoints" / "step-4").is_dir()
    checkpoints.save(3, arrays_of(3), INFO, adapter)
    assert [p.name for p in Checkpoints(out).steps()] == ["step-3", "step-2"]


def test_a_damaged_one_is_written_again(out: Path) -> None:
    (out / "checkpoints" / "step-4" / STATE_FILE).write_bytes(b"?")
    checkpoints = Checkpoints(out)
    checkpoints.load()
    checkpoints.save(4, arrays_of(4), INFO, adapter)
    assert step_of(out) == 4


def test_a_checkpoint_that_is_whole_is_not_written_again(out: Path) -> None:
    """So that no moment is without it: a run that resumes at its last step saves that step once more."""

    def again(folder: Path) -> None:
        raise AssertionError("written again")

    Checkpoints(out).save(4, arrays_of(4), INFO, again)
    assert step_of(out) == 4


def test_the_best_are_kept_beside_the_newest(out: Path) -> None:
    checkpoints = Checkpoints(out)
    for step, best, left in ((6, [2], "step-2 step-4 step-6"), (8, [4, 2], "step-2 step-4 step-6 step-8")):
        checkpoints.save(step, arrays_of(step), INFO, adapter, best)
        assert sorted(p.name for p in checkpoints.steps()) == left.split()
    checkpoints.prune([4, 99])
    assert sorted(p.name for p in checkpoints.steps()) == ["step-4", "step-6", "step-8"]
    found = checkpoints.arrays_of(4)
    assert found is not None and found["parameters"].tolist() == arrays_of(4)["parameters"].tolist()
    (out / "checkpoints" / "step-4" / STATE_FILE).write_bytes(b"?")
    assert checkpoints.arrays_of(4) is None and checkpoints.arrays_of(2) is None and step_of_newest(checkpoints) == 8


def step_of_newest(checkpoints: Checkpoints) -> int:
    state = checkpoints.load()
    assert state is not None
    return state.step


def test_when_all_are_damaged_it_stops_and_touches_nothing(out: Path) -> None:
    for step in (2, 4):
        (out / "checkpoints" / f"step-{step}" / STATE_FILE).write_bytes(b"?")
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    with pytest.raises(WgradError, match=r"no checkpoint in .* is whole \(step-4: .*; step-2: .*\): put a copy back"):
        Checkpoints(out).load()
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_none_is_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path).load() is None
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-four").mkdir()
    assert Checkpoints(tmp_path).load() is None


# ---- formats -----------------------------------------------------------------------------------
def test_the_first_format_is_refused_by_name(out: Path) -> None:
    """Its sum was of trainer.safetensors alone."""
    newest = out / "checkpoints" / "step-4"
    record = {"format": 1, "step": 4, **INFO, "sha256": _sha256(newest / STATE_FILE)}
    write_json(newest / INFO_FILE, record)
    with pytest.raises(WgradError, match=f"step-4 has format 1, and this version of wgrad reads format {FORMAT}"):
        Checkpoints(out).load()


def test_a_later_format_is_refused_by_name(out: Path) -> None:
    """And not passed over as damaged, which would throw away what a newer version has done."""
    path = out / "checkpoints" / "step-4" / INFO_FILE
    write_json(path, _signed(json.loads(path.read_text()) | {"format": FORMAT + 1}))
    with pytest.raises(WgradError, match=f"step-4 has format {FORMAT + 1}"):
        Checkpoints(out).load()
