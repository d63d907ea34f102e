"""The copy of wgpu's library: made of a known file only, loaded only while whole, used only by cards that passed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from wgrad.device.errors import DeviceError
from wgrad.train.commands.cli import main
from wgrad.wgsl.runtime import adapters, matrix_units
from wgrad.wgsl.runtime.webgpu_trace import PROFILES, TraceDevice


@pytest.fixture(autouse=True)
def cache(wgpu_device: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this test. The device is there before: Mesa keeps its own cache where this variable says."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    monkeypatch.delenv(matrix_units.SWITCH, raising=False)
    monkeypatch.delenv("WGPU_LIB_PATH", raising=False)
    return tmp_path / "wgrad" / "matrix-units"


def known_library() -> Path:
    source = matrix_units.installed()
    if source is None or matrix_units.known(source) is None:
        pytest.skip("the installed wgpu is not a library that was tried")
    return source


def test_the_copy_differs_in_the_gate_alone(cache: Path) -> None:
    source = known_library()
    before, library = source.read_bytes(), matrix_units.known(source)
    assert library is not None
    copy = matrix_units.write_copy()
    made = copy.read_bytes()
    different = [i for i in range(0, len(made)) if made[i] != before[i]] if made != before else []
    assert source.read_bytes() == before and len(made) == len(before)
    assert different and set(different) <= set(range(library.offset, library.offset + len(library.after)))
    assert copy.parent == cache and "MIT" in (cache / "LICENSE").read_text(encoding="utf-8")
    assert matrix_units.copy_to_load() == copy


def test_wgpu_works_on_the_copy(cache: Path) -> None:
    known_library()
    matrix_units.write_copy()
    code = (
        "import numpy as np; from wgrad.wgsl.runtime import native; from wgrad.wgsl.device import WgpuDevice;"
        "from wgrad.autograd.bind import bind;"
        "d = bind(WgpuDevice)();"
        "print(native.COPY_LOADED, float(d.download(d.add(d.upload(np.ones(3, np.float32)), d.zeros((3,))))[0]))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", env=env)
    assert done.stdout.split() == ["True", "1.0"], done.stderr


def test_an_unknown_library_is_refused(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "libwgpu_native-release.so"
    other.write_bytes(b"another build")
    monkeypatch.setattr(matrix_units, "installed", lambda: other)
    with pytest.raises(DeviceError, match=matrix_units.sha256(other)):
        matrix_units.write_copy()
    assert not cache.exists() and other.read_bytes() == b"another build"


def test_a_copy_that_is_not_whole_is_not_loaded(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known_library()
    copy = matrix_units.write_copy()
    monkeypatch.setenv(matrix_units.SWITCH, "off")
    assert matrix_units.copy_to_load() is None
    monkeypatch.delenv(matrix_units.SWITCH)
    monkeypatch.setenv("WGPU_LIB_PATH", "/somebody's own")
    assert matrix_units.copy_to_load() is None
    monkeypatch.delenv("WGPU_LIB_PATH")
    newer = tmp_path / copy.name  # wgpu was upgraded
    newer.write_bytes(b"newer")
    with monkeypatch.context() as upgraded:
        upgraded.setattr(matrix_units, "installed", lambda: newer)
        assert matrix_units.copy_to_load() is None
    assert matrix_units.copy_to_load() == copy
    data = bytearray(copy.read_bytes())
    data[1000] ^= 1
    copy.write_bytes(data)
    assert matrix_units.copy_to_load() is None


def test_a_device_without_one_of_the_features_has_no_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    features = {matrix_units.FEATURE, "shader-f16", "subgroup", "timestamp-query"}
    for lacking in ("", matrix_units.FEATURE, "shader-f16", "subgroup"):
        whole = not lacking
        adapter = SimpleNamespace(
            features=features - {lacking}, info={"device": "a card", "description": ""}, limits={}
        )
        adapter.request_device_sync = lambda required_features, required_limits: required_features
        assert (matrix_units.FEATURE in adapters.open_device(adapter)) == whole
        monkeypatch.setattr(adapters, "_usable", lambda adapter=adapter: [adapter])
        assert len(adapters.matrix_unit_cards()) == whole
        device = TraceDevice(PROFILES[0])
        device._device.features = adapter.features
        device._start(device._device, device._queue, {**adapter.info, "adapter_type": "", "backend_type": ""}, None)
        assert device.matrix_units == whole


def test_only_a_card_that_passed_is_asked_for_the_feature(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = matrix_units.identity("a card", "driver 1")
    assert matrix_units.may_ask(card, copy_loaded=False)  # the library itself decides
    assert not matrix_units.may_ask(card, copy_loaded=True)
    cache.mkdir(parents=True)
    matrix_units.keep_verdict(card, False, "hangs")
    assert matrix_units.verdict(card) == (False, "hangs") and not matrix_units.may_ask(card, True)
    matrix_units.keep_verdict(card, True, "")
    assert matrix_units.may_ask(card, True)
    assert not matrix_units.may_ask(matrix_units.identity("a card", "driver 2"), True)
    monkeypatch.setenv(matrix_units.SWITCH, "off")
    assert not matrix_units.may_ask(card, True) and not matrix_units.may_ask(card, False)
    monkeypatch.setenv(matrix_units.SWITCH, "trial")
    assert matrix_units.may_ask("never seen", True)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 2, "cards": {}}', '{"format": 1, "cards": 7}', "[" * 100_000]
)
def test_damaged_verdicts_are_none(cache: Path, text: str) -> None:
    cache.mkdir(parents=True)
    (cache / "cards.json").write_text(text, encoding="utf-8")
    assert matrix_units.verdict("a card") is None


def test_the_command(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix-units", "status"]) == 0
    assert "copy:    none" in capsys.readouterr().out
    if "nothing to enable" in (main(["matrix-units", "enable"]), capsys.readouterr().out)[1]:
        assert not cache.exists()  # no card here lists the feature, so nothing was written
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "cards.json").write_text("{}", encoding="utf-8")
    assert main(["matrix-units", "disable"]) == 0
    assert capsys.readouterr().out == "removed\n" and not cache.exists()
    assert main(["matrix-units", "disable"]) == 0
    assert main(["matrix-units", "on"]) == 2
