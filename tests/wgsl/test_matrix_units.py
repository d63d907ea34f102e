"""The patched copy of wgpu's library: made only from known files, loaded only if intact, used only by checked GPUs."""

from __future__ import annotations

import ctypes
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
from wgrad.autograd.selftest.matrix import matrix_cases, trusted_cases
from wgrad.autograd.selftest.probe import Verdict
from wgrad.device.errors import DeviceError, DeviceLost
from wgrad.device.formats.frozen_weight import formats
from wgrad.train.commands.cli import main
from wgrad.wgsl.formats.formats import WeightForm
from wgrad.wgsl.gemm.gemm_matrix import unit_of
from wgrad.wgsl.runtime import adapters, cooperative_shapes, matrix_units, native, vulkan_memory
from wgrad.wgsl.runtime.experimental_gate import find_gate
from wgrad.wgsl.webgpu_trace import PROFILES, TraceDevice


@pytest.fixture(autouse=True)
def cache(wgpu_device: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the test's cache folder. The device is opened before, since this variable sets Mesa's cache, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    monkeypatch.delenv(matrix_units.SWITCH, raising=False)
    monkeypatch.delenv("WGPU_LIB_PATH", raising=False)
    return tmp_path / "wgrad" / "matrix-units"


def known_library() -> Path:
    source = matrix_units.installed()
    if source is None or matrix_units.gate_of(source) is None:
        pytest.skip("the installed wgpu is a library whose gate is not found")
    matrix_units.keep_verdict("another card", True, "")  # without which no copy is loaded
    return source


def test_the_copy_differs_in_the_gate_alone(cache: Path) -> None:
    source = known_library()
    before, gate = source.read_bytes(), matrix_units.gate_of(source)
    assert gate is not None
    copy = matrix_units.write_copy()
    made = copy.read_bytes()
    different = [i for i in range(0, len(made)) if made[i] != before[i]] if made != before else []
    assert source.read_bytes() == before and len(made) == len(before)
    assert different and set(different) <= set(range(gate.offset, gate.offset + len(gate.after)))
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


def test_a_copy_that_no_gpu_passed_on_is_loaded_by_the_check_alone(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release is untested and may crash the process that loads it."""
    known_library()
    copy = matrix_units.write_copy()
    monkeypatch.delitem(sys.modules, "wgpu")
    for passed, mode, loaded in ((False, "", False), (False, "trial", True), (True, "", True)):
        (cache / "cards.json").unlink(missing_ok=True)
        matrix_units.keep_verdict(CARD, passed, "it crashed")
        monkeypatch.setenv(matrix_units.SWITCH, mode)
        assert matrix_units.copy_to_load() == (copy if loaded else None)
        with matrix_units.using_copy() as used:
            assert used == loaded


def library_of(processor: str, *parts: bytes) -> bytes:
    """Return a file with the header of a library and these parts from byte 256 on, each at a multiple of 16, with
    compilers' padding between functions."""
    head = bytearray(b"\x7fELF\x02".ljust(18, b"\0") + {"x86-64": b"\x3e\0", "aarch64": b"\xb7\0"}[processor])
    if processor == "x86-64":
        return bytes(head).ljust(256, b"\xcc") + b"".join((part + b"\xcc").ljust(32, b"\xcc") for part in parts)
    return bytes(head).ljust(256, b"\0") + b"".join(b"\xc0\x03\x5f\xd6" + part.ljust(28, b"\0") for part in parts)


GATE_X86 = bytes.fromhex("48b800000000010087 0231d2c3")
GATE_ARM = bytes.fromhex("2000c0d2 e1031faa e050e0f2 c0035fd6")
OTHERS_X86 = {
    "the set of all features": bytes.fromhex("48b8ffffffffff070000 31d2c3"),
    "fewer experimental features": bytes.fromhex("48b800000000000087 0231d2c3"),
    "many features": bytes.fromhex("48b80000000001ffffff 31d2c3"),
    "inside another function": b"\x90" * 3 + GATE_X86,
    "another second word": bytes.fromhex("48b800000000010087 0231c0c3"),
    "nothing": b"",
}


@pytest.mark.parametrize("other", OTHERS_X86)
@pytest.mark.parametrize("places", [0, 1, 2])
def test_a_gate_is_taken_where_there_is_one(other: str, places: int) -> None:
    data = library_of("x86-64", OTHERS_X86[other], *[b"\x90" * 20, GATE_X86] * places)
    if places == 1:
        gate = find_gate(data)
        assert data[gate.offset :].startswith(GATE_X86)
        made = gate.lifted(data)
        assert made[gate.offset : gate.offset + 5].hex() == "31c031d2c3" and len(made) == len(data)
        assert find_gate(b"MZ".ljust(60, b"\0") + b"\x40\0\0\0PE\0\0\x64\x86" + data[70:]) == gate
    else:
        with pytest.raises(DeviceError, match=f"{places or 'no'} places that could be the gate"):
            find_gate(data)


def test_the_gate_of_newer_releases_is_found() -> None:
    """They have more experimental features and other places, also on Arm. Files for other processors have no gate."""
    more = bytes.fromhex("48b80000000001004f 0e31d2c3")
    assert find_gate(library_of("x86-64", b"\x90" * 20, b"", more)).offset == 256 + 64
    arm = library_of("aarch64", b"", GATE_ARM)
    gate = find_gate(arm)
    assert arm[gate.offset :].startswith(GATE_ARM)
    assert gate.lifted(arm)[gate.offset : gate.offset + 12].hex() == "000080d2010080d2c0035fd6"
    for data in (library_of("aarch64", GATE_ARM, GATE_ARM), library_of("aarch64", GATE_X86)):
        with pytest.raises(DeviceError, match="places"):
            find_gate(data)
    for data in (b"\xcf\xfa\xed\xfe" + arm, b"", b"MZ", b"\x7fELF\x02"):
        with pytest.raises(DeviceError, match="no library for"):
            find_gate(data)


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


def test_a_link_in_the_place_of_the_license_is_not_followed(cache: Path, tmp_path: Path) -> None:
    known_library()
    cache.mkdir(parents=True, exist_ok=True)
    (tmp_path / "mine").write_text("mine")
    (cache / "LICENSE").symlink_to(tmp_path / "mine")
    matrix_units.write_copy()
    assert (tmp_path / "mine").read_text() == "mine" and "MIT" in (cache / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="without /proc the copy is loaded by its name")
def test_the_file_that_was_checked_is_the_one_that_is_loaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if another file takes its name in between."""
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
    """An adapter whose features include those of tensor cores.

    gives: whether its library enables them. asked: features requested for each device.
    """

    def __init__(self, backend: str = "Vulkan", lacking: str = "", gives: bool = True) -> None:
        features = {matrix_units.FEATURE, "shader-f16", "subgroup", "timestamp-query"} - {lacking}
        info: dict[str, Any] = {
            "device": "a card",
            "description": "driver 1",
            "backend_type": backend,
            "adapter_type": "DiscreteGPU",
        }
        info |= {"vendor_id": 1, "device_id": 2}
        super().__init__(features=features, info=info, limits={}, gives=gives, asked=[])

    def request_device_sync(self, required_features: list[str], required_limits: object = None) -> SimpleNamespace:
        self.asked.append(required_features)
        if matrix_units.FEATURE in required_features and not self.gives:
            raise RuntimeError("experimental")
        return SimpleNamespace(features=required_features, destroy=lambda: None)


CARD = matrix_units.identity("a card", "driver 1")


def test_a_gpu_that_is_lost_as_it_is_asked_is_not_opened_without_tensor_cores() -> None:
    """It is opened again (select_device.py), where a library that refuses the feature gives a device without it."""
    matrix_units.keep_verdict(CARD, True, "")

    class Lost(Adapter):
        def request_device_sync(self, required_features: list[str], required_limits: object = None) -> SimpleNamespace:
            if not self.asked:
                self.asked.append(required_features)
                raise RuntimeError("Request device failed (3): Validation Error\n\nCaused by:\n  Parent device is lost")
            return super().request_device_sync(required_features, required_limits)

    with pytest.raises(DeviceLost, match="adapter 'a card' gave no device: Request device .* Parent device is lost"):
        adapters.open_device(Lost())
    adapter = Adapter(gives=False)
    assert matrix_units.FEATURE not in adapters.open_device(adapter).features and len(adapter.asked) == 2


def test_a_refusal_without_words_is_told_by_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that the library logged with a refusal is no error of a later launch."""

    def refuse(*_: Any, **__: Any) -> None:
        native.error_log().messages.append("Request device failed")
        raise TimeoutError

    monkeypatch.setattr(Adapter, "request_device_sync", refuse)
    with pytest.raises(DeviceError, match="adapter 'a card' gave no device: TimeoutError$"):
        adapters.open_device(Adapter())
    assert not native.error_log().messages


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


@pytest.mark.parametrize(
    "shapes, used",
    [
        (None, (16, 16, 16)),
        ([(16, 16, 16), (16, 8, 16)], (16, 16, 16)),
        ([(8, 8, 8), (16, 16, 16)], (16, 16, 16)),
        ([(8, 8, 8), (8, 8, 16)], (8, 8, 8)),
        ([(8, 16, 16)], None),
        ([(8, 8, 16)], None),
        ([], None),
    ],
)
def test_a_gpu_of_another_shape_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, shapes: list[tuple[int, int, int]] | None, used: tuple[int, int, int] | None
) -> None:
    """naga has no types for Intel's shapes: its drivers compile kernels of 16 x 16 x 16, but compute something else. If
    a driver reports no shapes, the check decides."""
    told = {} if shapes is None else {(1, 2): frozenset(cooperative_shapes.Shape(*shape) for shape in shapes)}
    monkeypatch.setattr(cooperative_shapes, "_shapes", lambda: told)
    matrix_units.keep_verdict(CARD, True, "")
    assert adapters.matrix_shape(Adapter()) == used
    assert (matrix_units.FEATURE in adapters.open_device(Adapter()).features) == bool(used)


def test_shapes_of_tensor_cores_are_those_that_vulkan_tells() -> None:
    """The driver reports three shapes: one has float16 sums, and one is for workgroups."""
    shapes = [((16, 16, 16), (0, 0, 1, 1), 3), ((16, 8, 8), (0, 0, 0, 0), 3), ((64, 64, 16), (0, 0, 1, 1), 2)]

    @ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint32), ctypes.c_void_p)
    def ask(handle: int, count: Any, places: int | None) -> int:
        if places:
            found = (cooperative_shapes._Properties * count[0]).from_address(places)
            for place, (sizes, components, scope) in zip(found, shapes):
                assert place.type == 1000506001
                place.sizes[:], place.components[:], place.scope = sizes, components, scope
        count[0] = len(shapes)
        return 0

    def look_up(instance: object, name: bytes) -> int | None:
        return ctypes.cast(ask, ctypes.c_void_p).value if known else None

    vulkan = SimpleNamespace(vkGetInstanceProcAddr=look_up)
    device = vulkan_memory.PhysicalDevice(vulkan, ctypes.c_void_p(1), ctypes.c_void_p(2), (1, 2))
    for known in (True, False):
        wanted = frozenset({cooperative_shapes.Shape(16, 16, 16)}) if known else None
        assert cooperative_shapes._shapes_of(device) == wanted
    assert isinstance(cooperative_shapes._shapes(), dict)  # of the drivers here, which may have none


def test_a_backend_of_another_shape_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metal's matrices are 8 x 8: kernels of 16 x 16 are never used there, even if the cache says they passed."""
    matrix_units.keep_verdict(CARD, True, "")
    monkeypatch.setenv(matrix_units.SWITCH, "trial")
    for backend in ("Metal", "D3D12"):
        adapter = Adapter(backend)
        assert matrix_units.FEATURE not in adapters.open_device(adapter).features and len(adapter.asked) == 1
        monkeypatch.setattr(adapters, "_usable", lambda adapter=adapter: {0: adapter})
        assert adapters.matrix_unit_cards() == []


def test_only_a_gpu_that_passed_is_asked_for_the_feature(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_kernels_that_changed_cost_no_verdict_but_a_bad_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run checks them, and may find that later kernels are right where earlier ones failed."""
    for passed in (True, False):
        monkeypatch.setattr(matrix_units, "_kernels", lambda: "before")
        matrix_units.keep_verdict(CARD, passed, "why")
        assert matrix_units.verdict(CARD) == (passed, "why")
        monkeypatch.setattr(matrix_units, "_kernels", lambda: "after")
        assert matrix_units.verdict(CARD) == ((True, "why") if passed else None)


def idle_device() -> Any:
    facts = {"name": "a card", "driver": "driver 1", "backend": "Vulkan", "features": [matrix_units.FEATURE]}
    device = SimpleNamespace(name="wgpu", tensor_cores_off="", matrix_units=False, float16=True, facts=facts)
    device.lacks = frozenset()  # operators
    device.simpler = ()
    return device


@pytest.mark.parametrize("passes", [True, False])
def test_a_library_that_gives_them_has_the_gpu_checked_once(monkeypatch: pytest.MonkeyPatch, passes: bool) -> None:
    """With a later wgpu, the user need do nothing, and tensor cores whose sums stay zero are not used."""
    adapter, checks = Adapter(), list[dict[str, str]]()

    def check(module: str, *arguments: str, environment: dict[str, str]) -> tuple[Verdict, bool]:
        checks.append(environment)
        assert matrix_units.verdict(CARD) == (False, "it was begun and did not end")  # were the power to go now
        return Verdict(passes, "" if passes else "sums are zero"), True

    monkeypatch.setattr(adapters, "_usable", lambda: {0: adapter})
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
    """The GPU is used without tensor cores, rather than checked at every start."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "file"))
    monkeypatch.setattr(command, "check_in_a_process", lambda *args, **options: pytest.fail("checked"))
    monkeypatch.setattr(adapters, "_usable", lambda: {0: Adapter()})
    assert not command.first_check(idle_device())


def test_the_check_has_every_form_and_few_formats() -> None:
    """The formats are decoded 8 or 16 elements at a time. A run checks those that it uses."""
    every, trusted = [{case.name.split("/")[0] for case in of()} for of in (matrix_cases, trusted_cases)]
    assert {name for name in trusted if name.startswith("linear")} == {
        f"linear_{format}{direction}" for format in ("nf4", "q4_k") for direction in ("", "_backward")
    }
    assert every - trusted == {name for name in every if name.startswith("linear")} - trusted
    assert {unit_of(WeightForm(name, formats()[name].unit, (64, 256)), 64) for name in ("nf4", "q4_k")} == {8, 16}


def test_a_library_that_refuses_them_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "check_in_a_process", lambda *args, **options: pytest.fail("checked"))
    adapter = Adapter(gives=False)
    monkeypatch.setattr(adapters, "_usable", lambda: {0: adapter})
    assert not command.first_check(idle_device()) and len(adapter.asked) == 1
    adapter.gives = True
    monkeypatch.setenv(matrix_units.SWITCH, "off")
    assert not command.first_check(idle_device())
    assert len(adapter.asked) == 1


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 2, "cards": {}}', '{"format": 1, "cards": 7}', "[" * 100_000]
)
def test_damaged_verdicts_are_none(cache: Path, text: str) -> None:
    cache.mkdir(parents=True)
    (cache / "cards.json").write_text(text, encoding="utf-8")
    assert matrix_units.verdict("a card") is None


def test_the_command_reports_and_removes_the_copy(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix-units", "status"]) == 0
    assert "copy:    none" in capsys.readouterr().out
    if "nothing to enable" in (main(["matrix-units", "enable"]), capsys.readouterr().out)[1]:
        assert not cache.exists()  # no GPU here lists the feature, so nothing was written
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "cards.json").write_text("{}", encoding="utf-8")
    assert main(["matrix-units", "disable"]) == 0
    assert capsys.readouterr().out == "removed\n" and not cache.exists()
    assert main(["matrix-units", "disable"]) == 0
    assert main(["matrix-units", "on"]) == 2
