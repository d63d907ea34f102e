"""Libraries of wgpu, as their wheels have them and with their gates lifted, on a software driver.

    tests/portability/fetch_mesa.sh
    apt-get install gcc gcc-aarch64-linux-gnu gcc-mingw-w64-x86-64-win32 qemu-user-static wine64 xvfb
    python -m tests.portability.gates
    python -m tests.portability.gates --find 0.31.1 0.32.0    where the gate of a release is, without running it

A line for each library; status 1 where one does not refuse an experimental feature as it is, or does not give it as a
copy (experimental_probe.c). Needs Debian 12 on x86-64, PyPI and Debian's packages. Linux on Arm runs by QEMU, with
Arm's packages in a folder; Windows by Wine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from tests.portability.dawn import FETCHED, HERE, LAVAPIPE
from wgrad.device.errors import DeviceError
from wgrad.wgsl.runtime.experimental_gate import find_gate

VERSIONS = ("0.32.0",)  # of the Python package wgpu
# By platform, what pip calls it; and the compiler of what runs there.
PLATFORMS = {
    "Linux x86-64": ("manylinux_2_28_x86_64", "gcc"),
    "Linux aarch64": ("manylinux_2_28_aarch64", "aarch64-linux-gnu-gcc"),
    "Windows x86-64": ("win_amd64", "x86_64-w64-mingw32-gcc"),
}
ARM_LIBRARIES = "usr/lib/aarch64-linux-gnu"
# Rust's standard library asks it for random numbers; Wine 8 has none.
BCRYPT_PRIMITIVES = """
#include <windows.h>
#include <ntsecapi.h>
__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE data, SIZE_T length) { return RtlGenRandom(data, (ULONG)length); }
"""


def run(*command: str | Path, environment: dict[str, str] | None = None, folder: Path | None = None) -> str:
    """Run a command and return its output. Raises RuntimeError with its output if it fails."""
    env = {**os.environ, **(environment or {})}
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", env=env, cwd=folder)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def library(version: str, wheel_of: str, folder: Path) -> bytes:
    """Return the library of a wheel, and write its headers into the folder. wheel_of: the platform, as pip calls it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    run(*pip, "--platform", wheel_of, "--dest", folder, f"wgpu=={version}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        inside = {Path(name).name: name for name in wheel.namelist() if name.startswith("wgpu/resources/")}
        for header in ("webgpu.h", "wgpu.h"):
            (folder / header).write_bytes(wheel.read(inside[header]))
        return wheel.read(next(path for name, path in inside.items() if "wgpu_native-release." in name))


def fetch(version: str, platform: str, folder: Path) -> list[Path]:
    """Return the library as it is, and with its gate lifted. Its headers are next to them."""
    data = library(version, PLATFORMS[platform][0], folder)
    stock, copy = folder / "stock.bin", folder / "copy.bin"
    stock.write_bytes(data)
    copy.write_bytes(find_gate(data).lifted(data))
    return [stock, copy]


def build(compiler: str, folder: Path) -> Path:
    probe = folder / "probe.exe"
    run(
        compiler,
        "-O1",
        f"-I{folder}",
        "-o",
        probe,
        HERE / "experimental_probe.c",
        *([] if "w64" in compiler else ["-ldl"]),
    )
    return probe


def icd(folder: Path, driver: str | Path) -> dict[str, str]:
    """The environment in which Vulkan's loader takes this driver alone."""
    path = folder / "icd.json"
    path.write_text(
        json.dumps({"file_format_version": "1.0.0", "ICD": {"library_path": str(driver), "api_version": "1.3.0"}})
    )
    return {"VK_DRIVER_FILES": str(path), "VK_ICD_FILENAMES": str(path), "XDG_RUNTIME_DIR": str(folder)}


def arm_packages(folder: Path) -> Path:
    """Mesa's driver for Arm and all that it links, unpacked: what QEMU takes for the root of the file system."""
    root, lists = folder / "root", folder / "lists"
    for place in (root, lists / "partial", folder / "debs", folder / "cache" / "archives" / "partial"):
        place.mkdir(parents=True)
    (folder / "status").touch()
    targets = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Component: main"]
    mirror = run(*targets, "Release: bookworm").splitlines()[0]
    signed = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
    suites = ("bookworm", "bookworm-backports")
    (folder / "sources.list").write_text("".join(f"deb {signed} {mirror} {suite} main\n" for suite in suites))
    settings = {
        "APT::Architecture": "arm64", "APT::Architectures": "arm64", "APT::Install-Recommends": "false",
        "Dir::State::Lists": lists, "Dir::State::status": folder / "status", "Dir::Cache": folder / "cache",
        "Dir::Etc::SourceList": folder / "sources.list", "Dir::Etc::SourceParts": "/dev/null",
    }  # fmt: skip
    apt = ["apt-get", "-qq", *(part for key, value in settings.items() for part in ("-o", f"{key}={value}"))]
    run(*apt, "update")
    wanted = [*apt, "-y", "--print-uris", "-t", suites[1], "install", "mesa-vulkan-drivers", "libvulkan1"]
    names = sorted({line.split()[1].split("_")[0] for line in run(*wanted).splitlines() if line.startswith("'")})
    run(*apt, "-t", suites[1], "download", *names, folder=folder / "debs")
    for package in (folder / "debs").glob("*.deb"):
        run("dpkg", "-x", package, root)
    return root


def runner(platform: str, folder: Path) -> tuple[list[str | Path], dict[str, str]]:
    """Return the command that runs a program of the platform, and its environment."""
    if platform == "Linux aarch64":
        root = arm_packages(folder)
        return ["qemu-aarch64-static", "-L", root], icd(folder, f"/{ARM_LIBRARIES}/{LAVAPIPE}")
    if platform == "Windows x86-64":
        (folder / "bcrypt.c").write_text(BCRYPT_PRIMITIVES)
        compiler = PLATFORMS[platform][1]
        run(compiler, "-shared", "-o", folder / "bcryptprimitives.dll", folder / "bcrypt.c", "-ladvapi32")
        settings = {"WINEPREFIX": str(folder / "wine"), "WINEDEBUG": "-all"}
        return ["xvfb-run", "--auto-servernum", "wine"], {**icd(folder, FETCHED), **settings}
    return [], icd(folder, FETCHED)


def lifts(stock: str, copy: str) -> bool:
    """Return whether the probe's output of both shows that the gate alone disables the feature."""
    return "EXPERIMENTAL_RAY_QUERY" in stock and "given" not in stock and copy.split() == ["given"]


def find(versions: Sequence[str]) -> int:
    """Print where the gate of each library is, also of Windows on Arm, or why none is found."""
    wrong = 0
    platforms = {**{name: wheel for name, (wheel, _) in PLATFORMS.items()}, "Windows aarch64": "win_arm64"}
    for version, (platform, wheel_of) in product(versions, platforms.items()):
        with tempfile.TemporaryDirectory() as name:
            data = library(version, wheel_of, Path(name))
        try:
            words = f"at {find_gate(data).offset:#x}"
        except DeviceError as error:
            wrong, words = wrong + 1, str(error)
        print(f"wgpu {version}, {platform}: {words}", flush=True)
    return 1 if wrong else 0


def main() -> int:
    if sys.argv[1:2] == ["--find"]:
        return find(sys.argv[2:])
    wrong = 0
    for version, platform in product(VERSIONS, PLATFORMS):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            folder = Path(name)
            libraries, probe = fetch(version, platform, folder), build(PLATFORMS[platform][1], folder)
            command, environment = runner(platform, folder)
            said = [run(*command, probe, path, environment=environment, folder=folder) for path in libraries]
        right = lifts(*said)
        wrong += not right
        words = "refused as it is, given as a copy" if right else f"as it is: {said[0]!r}; as a copy: {said[1]!r}"
        print(f"wgpu {version}, {platform}: {words}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
