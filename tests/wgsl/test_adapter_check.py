"""A driver that crashes or hangs is named and not used; the process that found it goes on with the others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from wgrad.wgsl.runtime import adapter_check, vulkan_drivers
from wgrad.wgsl.runtime.vulkan_drivers import VARIABLES, driver_files

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs a C compiler and Vulkan's loader of Linux"
)
DEVICES = "from wgrad.autograd.select_device import list_devices, select_device; import json; " + (
    "d = select_device('auto'); print(json.dumps([[(x['name'], x['usable'], x['reason']) for x in list_devices()], "
    "d.name, d.reason]))"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("driver") / "broken.so"
    source = Path(__file__).with_name("broken_driver.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(path), str(source), "-ldl"], check=True)
    return path


@pytest.fixture
def drivers(wgpu_device: Any, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make Vulkan list lavapipe and a broken driver, with an empty cache."""
    lavapipe = next((path for path in driver_files() if "lvp" in os.path.basename(path)), "")
    if not lavapipe:
        pytest.skip("lavapipe is not installed")
    broken = tmp_path / "broken_icd.json"
    registered = {"library_path": str(library), "api_version": "1.1.0"}
    broken.write_text(json.dumps({"file_format_version": "1.0.0", "ICD": registered}))
    for variable in VARIABLES:
        monkeypatch.setenv(variable, os.pathsep.join((lavapipe, str(broken))))
    real = json.loads(Path(lavapipe).read_text())["ICD"]["library_path"]
    monkeypatch.setenv("WGRAD_VULKAN_DRIVER", real)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(adapter_check.FINE, raising=False)
    return broken


def test_a_driver_that_crashes_is_named_and_the_others_are_used(
    drivers: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BROKEN", "load")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", DEVICES], capture_output=True, encoding="utf-8", env=environment)
    assert done.returncode == 0, done.stderr
    devices, name, reason = json.loads(done.stdout)
    assert name == "cpu" and "the Vulkan driver broken_icd.json crashed (SIGABRT)" in reason
    (broken,) = [d for d in devices if "broken_icd.json" in d[0]]
    assert not broken[1] and "while its adapters were listed" in broken[2]
    assert any("llvmpipe" in d[0] and d[1] for d in devices)
    assert len(list((tmp_path / "cache" / "wgrad" / "adapters").iterdir())) == 1


def test_a_verdict_is_kept_until_a_driver_changes(drivers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKEN", "load")
    asked: list[Any] = []
    said = adapter_check._Said(ready=True, ending="crashed (SIGSEGV)")

    def ask(backends: Any, files: Any, skip: Any) -> Any:
        asked.append(files)
        whole = adapter_check._Said(ready=True, adapters=["llvmpipe"], opening=0, done=True)
        return said if files is None or str(drivers) in files else whole

    monkeypatch.setattr(adapter_check, "_ask", ask)
    first = adapter_check.check("wgpu")
    assert [crash.name for crash in first.crashes] == ["the Vulkan driver broken_icd.json"]
    assert first.files is not None and len(first.files) == 1 and first.backends == ("Vulkan",)
    count = len(asked)
    assert adapter_check.check("wgpu") == first and len(asked) == count
    assert adapter_check.check("wgpu", again=True) == first and len(asked) == 2 * count
    os.utime(drivers, (1, 1))
    assert adapter_check.check("wgpu") == first and len(asked) == 3 * count
    said.hung = True  # which a busy machine may look like
    for _ in range(2):
        before = len(asked)
        os.utime(drivers, (2, 2))
        assert adapter_check.check("wgpu").crashes and len(asked) == before + count


def test_nothing_crashes_is_said_to_the_processes_of_this_one(drivers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = adapter_check._Said(ready=True, adapters=[], done=True)
    monkeypatch.setattr(adapter_check, "_ask", lambda *args: whole)
    assert adapter_check.check("wgpu") == adapter_check.Verdict()
    shutil.rmtree(os.environ["XDG_CACHE_HOME"])
    monkeypatch.setattr(adapter_check, "_ask", lambda *args: pytest.fail("asked again"))
    assert adapter_check.check("wgpu") == adapter_check.Verdict()


def test_drivers_are_looked_for_whatever_variables_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    icd = tmp_path / "vulkan" / "icd.d" / "a.json"
    icd.parent.mkdir(parents=True)
    icd.write_text(json.dumps({"ICD": {"library_path": "/a\0b"}}))
    monkeypatch.setenv("XDG_DATA_HOME", "/" + 300 * "x")  # listing it is refused
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path))
    assert driver_files()[0] == str(icd)
    assert vulkan_drivers.state_of_drivers() == vulkan_drivers.state_of_drivers()
    monkeypatch.setenv(VARIABLES[0], "/dev/zero")  # has no end
    assert ["/dev/zero"] == driver_files() and vulkan_drivers.state_of_drivers()


def test_an_adapter_that_does_not_open_is_left_out_alone(drivers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(backends: Any, files: Any, skip: Any) -> Any:
        said = adapter_check._Said(ready=True, adapters=["a", "b", "c"], opening=2, done=1 in skip)
        if 1 not in skip:
            said.opening, said.ending = 1, "crashed (SIGSEGV)"
        return said

    monkeypatch.setattr(adapter_check, "_ask", ask)
    verdict = adapter_check.check("wgpu")
    assert verdict.files is None
    assert verdict.crashes == (adapter_check.Crash("b", "crashed (SIGSEGV) while it was opened", 1),)


def test_a_driver_that_hangs_or_crashes_on_opening_is_told(drivers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKEN", "hang")
    monkeypatch.setattr(adapter_check, "SILENCE", 3.0)
    begun = time.monotonic()
    said = adapter_check._ask(["Vulkan"], [str(drivers)], [])
    assert said.hung and said.ready and said.adapters is None and time.monotonic() - begun < 60
    monkeypatch.setattr(adapter_check, "SILENCE", 30.0)
    monkeypatch.setenv("BROKEN", "open")
    crashes, failed, lasting = adapter_check._try(["Vulkan"], [str(drivers)])
    assert (
        failed is None
        and lasting
        and [(c.index, c.reason) for c in crashes] == [(0, "crashed (SIGABRT) while it was opened")]
    )
    assert "llvmpipe" in crashes[0].name


def test_a_process_that_hangs_as_it_ends_costs_no_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """All adapters have opened by then. The system may wait for a driver as it ends a process."""
    told = ("ready", 'listed ["a"]', "opening 0", "done")
    code = "import os, time\n" + "".join(f"print({line!r}, flush=True)\n" for line in told) + "{end}time.sleep(60)"
    monkeypatch.setattr(adapter_check, "SILENCE", 1.0)
    for end in ("", "os.close(1)\n"):
        monkeypatch.setattr(adapter_check, "_CODE", code.format(end=end).replace("{", "{{").replace("}", "}}"))
        assert adapter_check._try(["Vulkan"], None) == ([], None, True)
