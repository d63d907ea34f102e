"""`wgrad doctor` on machines that are made up: each thing that is wrong is one line; one that is well has none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wgrad.autograd import diagnosis
from wgrad.autograd.diagnosis import findings, notes
from wgrad.autograd.machine import LOADER, Machine
from wgrad.train.commands.cli import main

H100 = {"spec": "wgpu:0", "name": "NVIDIA H100", "type": "DiscreteGPU", "vendor_id": 0x10DE, "driver": "580.159.04"}
H100 |= {"features": ["shader-f16", "subgroup"], "usable": True}
RADEON = H100 | {"name": "AMD Radeon", "vendor_id": 0x1002, "driver": "Mesa 25.0.7"}
LAVAPIPE = H100 | {"name": "llvmpipe", "type": "CPU", "vendor_id": 0x10005, "driver": "Mesa 22.3.6 (LLVM 15.0.6)"}
CPU = {"spec": "cpu", "name": "NumPy", "usable": True, "reason": ""}
NO_HIP = {"spec": "hip", "name": "AMD HIP", "usable": False, "reason": "not usable: no AMD GPU was found"}
PCI = {"NVIDIA": "0x10de", "AMD": "0x1002", "Intel": "0x8086", "other": "0x1a03"}


class Fake:
    """A machine in a folder. Everything is well with a GPU of `vendor` at the beginning."""

    def __init__(self, root: Path, vendor: str = "NVIDIA") -> None:
        self.root, self.environment = root, dict[str, str]()
        self.devices: list[dict[str, Any]] = [{"NVIDIA": H100, "AMD": RADEON}[vendor]]
        self.libraries = {LOADER, "libGLX_nvidia.so.0", "/usr/lib/libvulkan_radeon.so", "/usr/lib/libvulkan_lvp.so"}
        self.packages, self.refused, self.idle, self.system = {"hip"}, set[str](), "", "Linux"
        self.card(vendor)
        self.driver("nvidia_icd.json", "libGLX_nvidia.so.0")
        self.driver("radeon_icd.x86_64.json", "/usr/lib/libvulkan_radeon.so")
        self.driver("lvp_icd.x86_64.json", "/usr/lib/libvulkan_lvp.so")
        self.driver("radeon_icd.i686.json", "/usr/lib32/libvulkan_radeon.so")  # of 32 bits: of no concern
        self.put("etc/os-release", 'NAME="Ubuntu"\nID=ubuntu\nID_LIKE=debian\n')
        self.put("dev/dri/renderD128")
        if vendor == "NVIDIA":
            self.put("dev/nvidia0")

    def put(self, name: str, text: str = "") -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def drop(self, *names: str) -> None:
        for name in names:
            (self.root / name).unlink()

    def card(self, vendor: str) -> None:
        for number, (kind, name) in enumerate((("0x030200", vendor), ("0x020000", "Intel"), ("0x030000", "other"))):
            self.put(f"sys/bus/pci/devices/{number}/class", kind + "\n")
            self.put(f"sys/bus/pci/devices/{number}/vendor", PCI[name] + "\n")

    def driver(self, name: str, library: str) -> None:
        self.put(f"usr/share/vulkan/icd.d/{name}", json.dumps({"ICD": {"library_path": library}}))

    def found(self) -> list[str]:
        return findings(self.machine())

    def machine(self) -> Machine:
        hidden = {str(self.root / name) for name in self.refused}
        return Machine(
            self.system,
            self.environment,
            [*([NO_HIP] * all(d["spec"] != "hip" for d in self.devices)), *self.devices, CPU],
            self.libraries.__contains__,
            self.packages.__contains__,
            lambda path: str(path) not in hidden,
            self.idle,
            self.root,
        )


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


def test_nothing_is_wrong(fake: Fake, tmp_path: Path) -> None:
    assert fake.found() == []
    fake.system, fake.libraries = "Windows", set()
    assert fake.found() == []
    fake = Fake(tmp_path / "amd", "AMD")
    fake.devices = [RADEON, NO_HIP | {"usable": True}]
    fake.put("dev/kfd")
    assert fake.found() == []


def test_long_variables_and_deep_files_are_read_without_an_error(fake: Fake) -> None:
    fake.environment = {"HOME": "/" + 300 * "x"}
    fake.put("usr/share/vulkan/icd.d/deep.json", "[" * 200_000)
    assert [driver.library for driver in fake.machine().vulkan_drivers() if driver.file.name == "deep.json"] == [""]
    fake.environment = {"VK_DRIVER_FILES": "/" + 300 * "x"}
    assert fake.machine().vulkan_drivers() == [] and fake.found() == []
    assert diagnosis._registered(fake.machine())[0].endswith("hides all other drivers: unset VK_DRIVER_FILES")


def test_drivers_are_read_where_the_loader_reads_them(fake: Fake) -> None:
    """The list is the one that wgpu's check has (wgsl/runtime/vulkan_drivers.py), below another root."""
    fake.put("usr/local/etc/vulkan/icd.d/own.json", json.dumps({"ICD": {"library_path": "libown.so"}}))
    fake.put("opt/data/vulkan/icd.d/more.json", json.dumps({"ICD": {"library_path": "libmore.so"}}))
    fake.environment["XDG_DATA_DIRS"] = "/opt/data"
    drivers = [driver.file.name for driver in fake.machine().vulkan_drivers()]
    assert drivers[0] == "more.json" and "own.json" in drivers and "nvidia_icd.json" in drivers
    for folder in ("home/one/.local/share", "home/one/data"):  # the user's, and the one that replaces it
        fake.put(f"{folder}/vulkan/icd.d/{folder.count('/')}.json", json.dumps({"ICD": {"library_path": "libmine.so"}}))
    fake.environment["HOME"] = "/home/one"
    assert fake.machine().vulkan_drivers()[0].file.name == "3.json"
    fake.environment["XDG_DATA_HOME"] = "/home/one/data"
    assert [driver.file.name for driver in fake.machine().vulkan_drivers()][:2] == ["2.json", "more.json"]


def without_card(fake: Fake) -> None:
    fake.devices = [LAVAPIPE]


def no_loader(fake: Fake) -> None:
    fake.libraries, fake.devices = set(), []
    for name in ("nvidia_icd.json", "radeon_icd.x86_64.json", "lvp_icd.x86_64.json"):
        fake.drop(f"usr/share/vulkan/icd.d/{name}")


def no_loader_on_arch(fake: Fake) -> None:
    no_loader(fake)
    fake.put("etc/os-release", "ID=arch\n")


def library_is_gone(fake: Fake) -> None:
    without_card(fake)
    fake.libraries.discard("libGLX_nvidia.so.0")


def no_json(fake: Fake) -> None:
    without_card(fake)
    fake.put("usr/share/vulkan/icd.d/nvidia_icd.json", "{")


def variable(fake: Fake) -> None:
    fake.devices = []
    fake.environment["VK_ICD_FILENAMES"] = "/opt/gone.json"


def only_lavapipe_for_a_card(fake: Fake) -> None:
    without_card(fake)
    fake.drop("usr/share/vulkan/icd.d/nvidia_icd.json")


def no_mesa(fake: Fake) -> None:
    fake.card("AMD")
    only_lavapipe_for_a_card(fake)
    fake.drop("usr/share/vulkan/icd.d/radeon_icd.x86_64.json", "dev/nvidia0")


def half_updated(fake: Fake) -> None:
    without_card(fake)
    fake.put("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31\nGCC")
    fake.put("usr/lib/x86_64-linux-gnu/libnvidia-glcore.so.580.159.04")


def too_old_to_see(fake: Fake) -> None:
    half_updated(fake)
    fake.put("usr/lib/x86_64-linux-gnu/libnvidia-glcore.so.550.90.07")


def no_card_at_all(fake: Fake) -> None:
    without_card(fake)
    fake.card("other")
    fake.drop("dev/nvidia0", "dev/dri/renderD128")


def no_driver_at_all(fake: Fake) -> None:
    no_card_at_all(fake)
    fake.devices = []


def not_permitted(fake: Fake) -> None:
    fake.card("AMD")
    without_card(fake)
    fake.put("dev/kfd")
    fake.refused = {"dev/kfd", "dev/dri/renderD128"}


def not_permitted_in_a_container(fake: Fake) -> None:
    not_permitted(fake)
    fake.put("run/.containerenv")
    fake.drop("dev/nvidia0")


def container(fake: Fake) -> None:
    without_card(fake)
    fake.put(".dockerenv")
    fake.drop("dev/nvidia0", "dev/dri/renderD128")


def container_beside_amd(fake: Fake) -> None:
    container(fake)
    fake.card("AMD")


def container_of_who_knows(fake: Fake) -> None:
    container(fake)
    fake.card("other")
    fake.environment["container"] = "podman"


def cuda_alone(fake: Fake) -> None:
    without_card(fake)
    fake.put(".dockerenv")
    fake.environment["NVIDIA_DRIVER_CAPABILITIES"] = "compute,utility"


def old_mesa(fake: Fake) -> None:
    fake.devices = [RADEON | {"driver": "Mesa 21.2.6"}]


def no_float16(fake: Fake) -> None:
    fake.devices = [H100 | {"features": ["subgroup"], "driver": "390.157"}]


def no_hip_python(fake: Fake) -> None:
    fake.devices, fake.packages = [RADEON], set()
    fake.put("dev/kfd")


def hip_fails(fake: Fake) -> None:
    fake.devices = [RADEON, {"spec": "hip", "usable": False, "reason": "not usable: no HIP driver: install ROCm"}]
    fake.put("dev/kfd")


def idle_units(fake: Fake) -> None:
    fake.idle = "the GPU's tensor cores are idle: wgrad matrix-units enable makes steps faster"


def battlemage(fake: Fake) -> None:
    b580 = {"name": "Intel(R) Arc(tm) B580 Graphics (BMG G21)", "vendor_id": 0x8086, "driver": "Mesa 26.1.4"}
    fake.devices = [H100 | b580] * 2


def no_resizable_bar(fake: Fake) -> None:
    fake.devices = [RADEON]
    fake.card("AMD")
    windows = "0x00000000d0000000 0x00000000dfffffff 0x000000000014220c\n0x000000000000e000 0x000000000000e0ff 0x40101"
    fake.put("sys/bus/pci/devices/0/resource", windows + "\n0x0 0x0 0x0\n")


def amd_crashes_on_windows(fake: Fake) -> None:
    fake.system = "Windows"
    fake.devices = [H100, {"spec": "wgpu", "name": "the Vulkan driver amd-vulkan64.json", "crash": "crashed"}]


def another_crashes_on_windows(fake: Fake) -> None:
    amd_crashes_on_windows(fake)
    fake.devices[1]["name"] = "the Vulkan driver nv-vk64.json"


def wgpu_is_broken(fake: Fake) -> None:
    fake.devices = [{"spec": "wgpu", "usable": False, "reason": "not usable: no library; pip install wgpu"}]


def mac(fake: Fake) -> None:
    fake.system, fake.devices = "Darwin", []


@pytest.mark.parametrize(
    ("change", "begin", "end"),
    [
        (no_loader, f"there is no Vulkan loader ({LOADER})", "apt-get install libvulkan1"),
        (no_loader_on_arch, "there is no Vulkan loader", "pacman -S vulkan-icd-loader"),
        (library_is_gone, "/usr/share/vulkan/icd.d/nvidia_icd.json names libGLX_nvidia.so.0, which is not", "the file"),
        (no_json, "/usr/share/vulkan/icd.d/nvidia_icd.json names no library", "delete the file"),
        (variable, "VK_ICD_FILENAMES names /opt/gone.json, which is not there", "unset VK_ICD_FILENAMES"),
        (only_lavapipe_for_a_card, "there is a GPU of NVIDIA and no Vulkan driver for it", "nvidia-driver)"),
        (no_mesa, "there is a GPU of AMD and no Vulkan driver for it", "apt-get install mesa-vulkan-drivers"),
        (half_updated, "NVIDIA's kernel module is 550.90.07 and its libraries are 580.159.04", "restart the machine"),
        (too_old_to_see, "there is a GPU of NVIDIA and a Vulkan driver, which gives no adapter", "tells more)"),
        (no_card_at_all, "only a software driver was found (llvmpipe)", "pass the GPU through to it"),
        (no_driver_at_all, "no GPU was found: if there is one of AMD or Intel, apt-get install mesa", "nvidia-driver)"),
        (not_permitted, "you may not open /dev/dri/renderD128 and /dev/kfd", "then log in again"),
        (not_permitted_in_a_container, "you may not open /dev/dri/renderD128 and /dev/kfd: start the", "(ls -ln)"),
        (container, "this is a container without a GPU: the machine has one of NVIDIA", "CAPABILITIES=all"),
        (container_beside_amd, "this is a container without", "--device /dev/dri (and --device /dev/kfd for HIP)"),
        (
            container_of_who_knows,
            "this is a container without a GPU: if the machine has one",
            "AMD and Intel",
        ),
        (cuda_alone, "NVIDIA_DRIVER_CAPABILITIES is compute,utility", "-e NVIDIA_DRIVER_CAPABILITIES=all"),
        (old_mesa, "AMD Radeon has Mesa 21.2, older than any that was tried (22.3)", "update Mesa"),
        (no_float16, "NVIDIA H100 has no shader-f16 with 390.157", "if the GPU can"),
        (no_hip_python, "there is an AMD GPU, and hip-python is not installed", "pip install 'wgrad[hip]'"),
        (hip_fails, "HIP does not work: no HIP driver", "install ROCm"),
        (idle_units, "the GPU's tensor cores are idle", "faster"),
        (battlemage, "Intel(R) Arc(tm) B580 Graphics (BMG G21): matmuls on Battlemage are wrong", "issues/25767)"),
        (no_resizable_bar, "AMD Radeon: resizable BAR is off", "issues/27097)"),
        (amd_crashes_on_windows, "the Vulkan driver amd-vulkan64.json crashed: AMD's driver for", "issues/422)"),
        (another_crashes_on_windows, "the Vulkan driver nv-vk64.json crashed: update its driver", "remove it"),
        (wgpu_is_broken, "wgpu does not work: no library", "pip install wgpu"),
        (mac, "wgpu finds no adapter", "from its maker"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or "",
)
def test_what_is_wrong_is_one_line(fake: Fake, change: Callable[[Fake], None], begin: str, end: str) -> None:
    change(fake)
    found = fake.found()
    assert len(found) == 1, found
    assert found[0].startswith(begin) and found[0].endswith(end), found
    assert "\n" not in found[0]


def test_what_cannot_be_changed_is_a_note(fake: Fake) -> None:
    fake.devices = [H100 | {"name": "NVIDIA GeForce GTX 1080", "features": []}]
    assert fake.found() == []
    (note,) = notes(fake.machine())
    assert note.startswith("NVIDIA GeForce GTX 1080: Pascal has no shader-f16") and note.endswith("issues/1836)")


def test_a_large_window_is_no_fault(fake: Fake) -> None:
    no_resizable_bar(fake)
    fake.put("sys/bus/pci/devices/0/resource", "0x0000008000000000 0x00000087ffffffff 0x000000000014220c\n")
    assert fake.found() == []


def test_doctor_prints_findings_and_its_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 1 and a line for each, or 0; which device is taken stands last."""
    monkeypatch.setattr("wgrad.train.commands.doctor.notes", lambda machine: ["it is old"])
    for lines, status in ((["the cable is loose: push it in"], 1), ([], 0)):
        monkeypatch.setattr("wgrad.train.commands.doctor.findings", lambda machine, lines=lines: lines)
        assert main(["doctor"]) == status
        *told, last = capsys.readouterr().out.splitlines()
        assert told == [*(f"- {line}" for line in lines), "note: it is old"]
        assert "--device auto takes " in last and last.startswith("nothing is wrong: ") == (not lines)
