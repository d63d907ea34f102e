"""The copy of wgpu's library: made of a known file only, loaded only while whole, used only by cards that passed."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wgrad.autograd import matrix_units as command
from wgrad.autograd import select_device
from wgrad.autograd.selftest.probe import Verdict
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
    assert matrix_units.write_copy() == copy == matrix_units.copy_to_load()
    made = copy.stat()
    assert matrix_units.write_copy() == copy
    assert copy.stat() == made  # Windows writes no file that a process has loaded


def test_a_link_in_the_place_of_the_licence_is_not_followed(cache: Path, tmp_path: Path) -> None:
    known_library()
    cache.mkdir(parents=True)
    (tmp_path / "mine").write_text("mine")
    (cache / "LICENSE").symlink_to(tmp_path / "mine")
    matrix_units.write_copy()
    assert (tmp_path / "mine").read_text() == "mine" and "MIT" in (cache / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="without /proc the copy is loaded by its name")
def test_the_file_that_was_checked_is_the_one_that_is_loaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though another takes its name in between."""
    known_library()
    copy = matrix_units.write_copy()
    checked = copy.stat().st_ino
    monkeypatch.delitem(sys.modules, "wgpu")
    with matrix_units.using_copy() as used:
        copy.unlink()
        copy.write_bytes(b"another library")
        assert used and os.stat(os.environ["WGPU_LIB_PATH"]).st_ino == checked
    assert "WGPU_LIB_PATH" not in os.environ  # processes that are started hereafter look for themselves


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_in_the_cache_is_not_waited_for(cache: Path) -> None:
    known_library()
    copy = matrix_units.write_copy()
    for path in (copy, cache / "cards.json"):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    assert matrix_units.copy_to_load() is None and matrix_units.verdict(CARD) is None


def test_a_folder_that_others_may_write_to_gives_no_library(cache: Path) -> None:
    known_library()
    matrix_units.write_copy()
    matrix_units.keep_verdict(CARD, True, "")
    cache.chmod(0o777)
    assert matrix_units.copy_to_load() is None and matrix_units.verdict(CARD) is None
    with pytest.raises(DeviceError, match="others may write to"):
        matrix_units.write_copy()


@pytest.mark.parametrize("kind", ["absent", "text", "another library"])
def test_a_wrong_library_is_an_error_in_a_line(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    if kind == "text":
        path.write_text("no library")
    elif kind == "another library":
        path = Path(importlib.import_module("_ctypes").__file__ or "")
    code = "from wgrad.autograd.select_device import select_device; select_device('wgpu')"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "WGPU_LIB_PATH": str(path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", env=env)
    last = done.stderr.splitlines()[-1]
    assert "DeviceUnavailable: device wgpu: WGPU_LIB_PATH: " in last and str(path) in last, done.stderr


class Adapter(SimpleNamespace):
    """An adapter that lists what matrix units need. gives: its library does. asked: features of each device."""

    def __init__(self, backend: str = "Vulkan", lacking: str = "", gives: bool = True) -> None:
        features = {matrix_units.FEATURE, "shader-f16", "subgroup", "timestamp-query"} - {lacking}
        info = {"device": "a card", "description": "driver 1", "backend_type": backend, "adapter_type": "DiscreteGPU"}
        super().__init__(features=features, info=info, limits={}, gives=gives, asked=[])

    def request_device_sync(self, required_features: list[str], required_limits: object = None) -> SimpleNamespace:
        self.asked.append(required_features)
        if matrix_units.FEATURE in required_features and not self.gives:
            raise RuntimeError("experimental")
        return SimpleNamespace(features=required_features, destroy=lambda: None)


CARD = matrix_units.identity("a card", "driver 1")


def test_a_device_without_one_of_the_features_has_no_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix_units.keep_verdict(CARD, True, "")
    for lacking in ("", matrix_units.FEATURE, "shader-f16", "subgroup"):
        whole, adapter = not lacking, Adapter(lacking=lacking)
        assert (matrix_units.FEATURE in adapters.open_device(adapter).features) == whole
        monkeypatch.setattr(adapters, "_usable", lambda adapter=adapter: {0: adapter})
        assert len(adapters.matrix_unit_cards()) == whole
        device = TraceDevice(PROFILES[0])
        device._device.features = adapter.features
        device._start(device._device, device._queue, {**adapter.info, "adapter_type": "", "backend_type": ""}, None)
        assert device.matrix_units == whole


def test_a_backend_of_another_shape_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of 16 x 16 on Metal, whose matrices are of 8 x 8: not even where somebody kept that they passed."""
    matrix_units.keep_verdict(CARD, True, "")
    monkeypatch.setenv(matrix_units.SWITCH, "trial")
    for backend in ("Metal", "D3D12"):
        adapter = Adapter(backend)
        assert matrix_units.FEATURE not in adapters.open_device(adapter).features and len(adapter.asked) == 1
        monkeypatch.setattr(adapters, "_usable", lambda adapter=adapter: {0: adapter})
        assert adapters.matrix_unit_cards() == []


def test_only_a_card_that_passed_is_asked_for_the_feature(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not matrix_units.may_ask(CARD)  # also where the library would give it
    matrix_units.keep_verdict(CARD, False, "hangs")
    assert matrix_units.verdict(CARD) == (False, "hangs") and not matrix_units.may_ask(CARD)
    matrix_units.keep_verdict(CARD, True, "")
    assert matrix_units.may_ask(CARD)
    assert not matrix_units.may_ask(matrix_units.identity("a card", "driver 2"))
    monkeypatch.setenv(matrix_units.SWITCH, "off")
    assert not matrix_units.may_ask(CARD)
    monkeypatch.setenv(matrix_units.SWITCH, "trial")
    assert matrix_units.may_ask("never seen")


def idle_device() -> Any:
    facts = {"name": "a card", "driver": "driver 1", "backend": "Vulkan", "features": [matrix_units.FEATURE]}
    return SimpleNamespace(name="wgpu", matrix_units=False, float16=True, facts=facts)


@pytest.mark.parametrize("passes", [True, False])
def test_a_library_that_gives_them_has_the_card_checked_once(monkeypatch: pytest.MonkeyPatch, passes: bool) -> None:
    """A later wgpu: no step of the user's, and no use of units that leave sums at zero."""
    adapter, checks = Adapter(), list[dict[str, str]]()

    def check(module: str, *arguments: str, environment: dict[str, str]) -> tuple[Verdict, bool]:
        checks.append(environment)
        assert matrix_units.verdict(CARD) == (False, "it was begun and did not end")  # were the power to go now
        return Verdict(passes, "" if passes else "sums are zero"), True

    monkeypatch.setattr(adapters, "_usable", lambda: {0: adapter})
    monkeypatch.setattr(matrix_units, "known", lambda path: None)
    monkeypatch.setattr(command, "check_in_a_process", check)
    opened = []

    def make(spec: str | None) -> Any:
        opened.append(matrix_units.FEATURE in adapters.open_device(adapter).features)
        return idle_device()

    monkeypatch.setattr(select_device, "bind", lambda kind: make)
    assert matrix_units.FEATURE not in adapters.open_device(adapter).features
    select_device.select_device("wgpu")
    assert opened == ([False, True] if passes else [False])
    assert checks == [{matrix_units.SWITCH: "trial"}]
    assert matrix_units.verdict(CARD) == (passes, "" if passes else "sums are zero")
    select_device.select_device("wgpu")
    assert len(checks) == 1 and opened[-1] == passes
    assert main(["matrix-units", "enable"]) == (0 if passes else 1)  # again, and without a copy
    assert len(checks) == 2 and not matrix_units.copy_path().exists()


def test_a_verdict_that_cannot_be_kept_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The card is used without its units: no check at every start."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "file"))
    monkeypatch.setattr(command, "check_in_a_process", lambda *args, **options: pytest.fail("checked"))
    monkeypatch.setattr(adapters, "_usable", lambda: {0: Adapter()})
    monkeypatch.setattr(matrix_units, "known", lambda path: None)
    assert not command.first_check(idle_device())


def test_a_library_that_refuses_them_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "check_in_a_process", lambda *args, **options: pytest.fail("checked"))
    adapter = Adapter(gives=False)
    monkeypatch.setattr(adapters, "_usable", lambda: {0: adapter})
    monkeypatch.setattr(matrix_units, "known", lambda path: None)
    assert not command.first_check(idle_device()) and len(adapter.asked) == 1
    adapter.gives = True
    monkeypatch.setenv(matrix_units.SWITCH, "off")
    assert not command.first_check(idle_device())
    monkeypatch.delenv(matrix_units.SWITCH)
    monkeypatch.setattr(matrix_units, "known", lambda path: matrix_units.KNOWN[0])  # it refuses: nobody need ask
    assert not command.first_check(idle_device()) and len(adapter.asked) == 1


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
