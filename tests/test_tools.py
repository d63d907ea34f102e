"""Missing compilers, browsers and drivers: tests are skipped, and the run ends with a list of what was not tested."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest, tools

ROOT = Path(__file__).parents[1]


def test_a_run_without_tools_passes_and_ends_with_what_was_not_tested(tmp_path: Path) -> None:
    files = [f"tests/{name}.py" for name in ("hip/test_objects", "hip/test_executor", "portability/test_watch_page")]
    command = (sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *files)
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    _, _, block = done.stdout.partition("not tested on this machine")
    lines = block.splitlines()[1:-1]
    for text in (
        "AMD kernels: on the emulated card, and compiled for AMD: clang-19 is not installed: apt-get install clang-19",
        "shaders through Dawn and RADV: node is not installed: apt-get install nodejs",
        "pages in a browser: chromium is not installed: apt-get install chromium (6 tests)",
    ):
        assert sum(line.startswith(text) for line in lines) == 1, (text, lines)


def test_a_machine_without_vulkan_is_reported() -> None:
    reason = f"Skipped: device wgpu: no Vulkan, Metal or DX12 {tools.NO_VULKAN} the GPU's driver"
    assert f"shaders on wgpu: {reason} (2 tests)" in tools.report([reason, reason, "another system"])


def test_a_whole_run_ends_with_the_files_that_took_longest() -> None:
    parts = [("a.py::one", 2.0), ("b.py::one[x::y]", 3.0), ("a.py::two", 1.5), ("c.py::one", 1.0)]
    reports = [SimpleNamespace(nodeid=name, duration=seconds) for name, seconds in parts]
    found = tools.slowest_files([*reports, SimpleNamespace(message="a warning")], least=4, count=2)
    assert found == ["   3.5 s  a.py", "   3.0 s  b.py"]
    assert tools.slowest_files(reports, least=5) == []


def test_to_ask_an_oracle_whether_it_is_a_fixture_imports_nothing() -> None:
    """As pytest asks each object of a file when it collects."""
    assert not hasattr(tools.Oracle("of_no_package"), "__wrapped__")


def test_collection_imports_no_oracle() -> None:
    assert conftest.imported_by_collection == set()


def test_collection_starts_no_thread() -> None:
    """A process with threads cannot be forked (tests/forks.py)."""
    assert conftest.threads_started_by_collection == 0


@pytest.mark.parametrize(("library", "kept"), [("libjemalloc.so.2", False), ("libasan.so.8", True)])
def test_programs_that_tests_start_have_the_allocator_of_a_real_run(
    monkeypatch: pytest.MonkeyPatch, library: str, kept: bool
) -> None:
    names = ("LD_PRELOAD", "MALLOC_CONF")
    for name in names:
        monkeypatch.setenv(name, f"/usr/lib/{library}")
    conftest._keep_allocator()
    assert [name in os.environ for name in names] == [kept] * 2


def test_what_earlier_files_left_is_not_searched_for_garbage() -> None:
    """Once a file, and garbage goes before the rest is left alone: it could hold a device's memory for good."""

    def begin() -> None:
        next(iter(conftest.pytest_runtest_protocol(item)))

    item: Any = SimpleNamespace(path=Path("tests/of_another_file.py"))
    kept: list[object] = []
    cycle: Any = type("Cycle", (), {})()
    cycle.itself, known_by = cycle, weakref.ref(cycle)
    del cycle
    assert any(known is kept for known in gc.get_objects())
    begin()
    assert not any(known is kept for known in gc.get_objects()) and known_by() is None
    later: list[object] = []
    begin()
    assert any(known is later for known in gc.get_objects())
