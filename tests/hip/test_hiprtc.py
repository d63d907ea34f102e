"""hiprtc for GPUs whose code objects were not built, through an emulated libhiprtc.so (tests/hip/emulator/rtc).

Each use is in its own process.
"""

from __future__ import annotations

import importlib.util
import lzma
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hip.emulator.build import clang, lock
from tests.tools import CLANG, CLANG_22
from wgrad.hip.runtime.objects import HIP, OPTIONS, headers, source_file, sources

RTC = Path(__file__).parent / "emulator" / "rtc"
USE = """
import sys; sys.path[:] = {path!r}
import numpy as np
from pathlib import Path
from wgrad.hip.runtime import compile, rtc
from wgrad.hip.device import HipDevice
from wgrad.autograd.bind import bind
rtc.HIP = Path({room!r})
compile.objects_folder = lambda: Path({objects!r})
try:
    device = bind(HipDevice)()
    print(device.description)
    x = np.arange(67, dtype=np.float32)
    print(np.array_equal(device.download(device.scale(device.upload(x), 3.0)), 3 * x))
except RuntimeError as error:
    print("error:", error)
"""


class Card:
    """An emulated gfx950 with hiprtc, for other processes."""

    def __init__(self, emulator: Any, folder: Path) -> None:
        self.libraries, self.cache, self.programs = folder / "lib", folder / "cache", folder / "programs"
        self.libraries.mkdir()
        self.programs.mkdir()
        shutil.copy(emulator.folder / "libamdhip64.so", self.libraries)
        made = emulator.folder / "libhiprtc.so"
        flags = ("-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", "-Wl,-soname,libhiprtc.so")
        source = RTC / "hiprtc.cpp"
        with lock(made):
            if not made.exists() or made.stat().st_mtime < source.stat().st_mtime:
                subprocess.run([clang(), *flags, source, "-o", made], check=True)
        shutil.copy(made, self.libraries)
        self.room, self.objects = HIP, folder / "no objects"
        self.architecture = "gfx950"
        self.version = 70100000

    def use(self) -> str:
        """A new process that makes a device and runs a kernel; what it says."""
        kept = {k: v for k, v in os.environ.items() if k not in ("WGRAD_HIP_OBJECTS", "HIP_LAUNCH_BLOCKING")}
        environment = {
            **kept,
            "LD_LIBRARY_PATH": str(self.libraries),
            "WGRAD_EMULATED_ARCH": self.architecture,
            "WGRAD_EMULATED_HIPRTC": str(self.programs),
            "WGRAD_EMULATED_HIPRTC_COMPILER": f"{sys.executable} {RTC / 'compile.py'}",
            "XDG_CACHE_HOME": str(self.cache),
            "WGRAD_EMULATED_VERSION": str(self.version),
        }
        code = USE.format(path=sys.path, room=str(self.room), objects=str(self.objects))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def given(self) -> list[str]:
        """Names of the programs that hiprtc was given, in order."""
        folders = sorted(self.programs.iterdir(), key=lambda p: int(p.name))
        return [next(f.glob("*.hip")).name for f in folders]


@pytest.fixture
def card(emulator: Any, tmp_path: Path) -> Card:
    CLANG.require()
    return Card(emulator, tmp_path)


def test_compiles_at_first_use_and_keeps_the_result(card: Card) -> None:
    said = card.use()
    assert "gfx950" in said and "kernels by hiprtc" in said and said.endswith("True\n")
    assert card.given() == ["elementwise.hip"]
    program = card.programs / "0"
    assert (program / "options").read_text().split() == ["--offload-arch=gfx950", *OPTIONS]
    assert {p.name for p in program.glob("*.hpp")} == {p.name for p in headers()}
    assert not (program / "gpu_host.hpp").exists()
    (kept,) = card.cache.glob("wgrad/hip/*")
    assert kept.name.startswith("elementwise-gfx950-") and lzma.decompress(kept.read_bytes())[:4] == b"\x7fELF"
    assert card.use() == said  # from the cache
    assert len(card.given()) == 1


def test_a_damaged_cache_is_made_again(card: Card) -> None:
    """Empty, no xz, and cut off."""
    said = card.use()
    (kept,) = card.cache.glob("wgrad/hip/*")
    whole = kept.read_bytes()
    for number, damage in enumerate((b"", b"nonsense", whole[: len(whole) // 2]), start=2):
        kept.write_bytes(damage)
        assert card.use() == said and len(card.given()) == number
        assert kept.read_bytes() == whole


def test_another_source_is_compiled_anew(card: Card, tmp_path: Path) -> None:
    card.use()
    card.room = tmp_path / "hip"
    shutil.copytree(HIP, card.room, ignore=shutil.ignore_patterns("objects", "__pycache__"))
    with (card.room / "runtime" / "gpu.hpp").open("a") as file:
        file.write("// one more line\n")
    assert card.use().endswith("True\n") and len(card.given()) == 2


def test_a_folder_that_cannot_be_written_to_is_no_error(card: Card) -> None:
    card.cache.write_text("a file where the folder should be")
    assert card.use().endswith("True\n")


def test_a_compile_error_shows_the_log(card: Card, tmp_path: Path) -> None:
    card.room = tmp_path / "hip"
    shutil.copytree(HIP, card.room, ignore=shutil.ignore_patterns("objects", "__pycache__"))
    with (card.room / "elementwise" / "elementwise.hip").open("a") as file:
        file.write("#include <cmath>\n")
    said = card.use()
    assert "hiprtc cannot compile elementwise.hip (--offload-arch=gfx950)" in said and "'cmath' file not found" in said
    assert list(card.cache.rglob("*.xz")) == []


def test_without_hiprtc_one_line_says_what_to_do(card: Card) -> None:
    (card.libraries / "libhiprtc.so").unlink()
    (line,) = [line for line in card.use().splitlines() if line.startswith("error:")]
    assert "install ROCm's hiprtc (libhiprtc.so)" in line and "wgrad.hip.runtime.build --arch gfx950`, which" in line


TOO_OLD = "error: no code object was built for gfx950, and the hiprtc that is installed is too old to compile the"


def test_a_hiprtc_that_is_too_old_is_not_asked(card: Card) -> None:
    """ROCm 6.3: its clang 18 has no buffer descriptors. What an earlier version compiled is used."""
    card.version = 60342134
    (line,) = [line for line in card.use().splitlines() if line.startswith("error:")]
    assert line.startswith(f"{TOO_OLD} kernels (HIP 6.3): install ROCm 7.0 or newer") and "--arch gfx950" in line
    assert card.given() == []
    card.version = 60443482
    assert card.use().endswith("True\n")
    card.version = 60342134
    assert card.use().endswith("True\n")


def test_a_compiler_without_buffer_descriptors_is_named_so(card: Card, tmp_path: Path) -> None:
    """As clang 18 says it, should a ROCm of another version have one."""
    card.room = tmp_path / "hip"
    shutil.copytree(HIP, card.room, ignore=shutil.ignore_patterns("objects", "__pycache__"))
    with (card.room / "elementwise" / "elementwise.hip").open("a") as file:
        file.write("#error use of undeclared identifier '__builtin_amdgcn_make_buffer_rsrc'\n")
    (line,) = [line for line in card.use().splitlines() if line.startswith("error:")]
    assert line.startswith(f"{TOO_OLD} kernels (HIP 7.1): install")


def test_an_unsupported_architecture_is_refused_first(card: Card) -> None:
    card.architecture = "gfx803"
    said = card.use()
    assert "Emulated gfx803 has architecture gfx803, which is not supported" in said and "--device wgpu" in said
    assert card.given() == []


@pytest.fixture(scope="module")
def rules() -> Any:
    """compile.py of the emulated hiprtc."""
    spec = importlib.util.spec_from_file_location("rtc_compile", RTC / "compile.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize("source", sources(), ids=lambda p: p.stem)
def test_every_source_keeps_hiprtcs_rules(source: Path, rules: Any, tmp_path: Path) -> None:
    """C++17, no other headers, and no name that collides with HIP's own device functions and types."""
    CLANG.require()
    for path in (source, *headers()):
        shutil.copy(path, tmp_path)
    for architecture in ("gfx1151", "gfx942"):
        said = rules.check_by_the_rules(tmp_path, source.name, [f"--offload-arch={architecture}", *OPTIONS])
        assert "error:" not in said, said


@pytest.mark.parametrize("source", ["gemm", "attention_backward_dq"])
def test_sources_with_instructions_of_cdna4_keep_them_too(source: str, rules: Any, tmp_path: Path) -> None:
    CLANG_22.require()
    for path in (source_file(source), *headers()):
        shutil.copy(path, tmp_path)
    said = rules.check_by_the_rules(tmp_path, f"{source}.hip", ["--offload-arch=gfx950", *OPTIONS], "clang-22")
    assert "error:" not in said, said
