"""Dawn, Chromium's WebGPU, in processes of Node; and the Vulkan drivers that can compute for it without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.tools import LAVAPIPE as FETCHED
from tests.tools import MESA, c_compiler
from wgrad.autograd.selftest.bundle import Bundle

HERE = Path(__file__).parent
ALL = os.environ.get("WGRAD_DAWN_ALL") == "1"
SWIFTSHADER = [f"{folder}/vk_swiftshader_icd.json" for folder in ("/usr/lib/chromium", "/opt/google/chrome")]
LAVAPIPE = "libvulkan_lvp.so"
# Half the vector width is half the code that LLVM is given (each lane loads by itself), and the code is so little used
# that optimizing it does not pay: a product's compile takes a third of the time. Mesa's cache on disk knows
# nothing of the width.
LAVAPIPE_SETTINGS = {"LP_NATIVE_VECTOR_WIDTH": "128", "GALLIVM_PERF": "nopt", "MESA_SHADER_CACHE_DISABLE": "true"}
MOST_WORKGROUP_BYTES = 48 << 10  # of the bundle's profiles
PROCESSES = 2  # at a time
CASES_PER_PROCESS = 40  # a driver keeps what it compiled: memory is bounded by beginning anew
SECONDS = None if ALL else 900  # for one process


@dataclass(frozen=True)
class Driver:
    """environment: of the processes that use it. adapter, float16, workgroup_bytes: as dawn.mjs tells."""

    environment: dict[str, str]
    adapter: str
    float16: bool
    workgroup_bytes: int


@dataclass(frozen=True)
class Ran:
    """results: of each case, as Runner.run of bundle_runner.mjs gives it. cpu_s: of all processes; peak_bytes: of the
    largest."""

    results: list[dict[str, Any]]
    cpu_s: float
    peak_bytes: int


def without_unused(bundle: Bundle) -> Bundle:
    """Return the bundle without the text of shaders that no case runs, which every process would read."""
    used = {step[1] for case in bundle.document["cases"] for step in case["steps"] if step[0] == "run"}
    shaders = [s if i in used else {**s, "code": ""} for i, s in enumerate(bundle.document["shaders"])]
    return Bundle({**bundle.document, "shaders": shaders}, bundle.block)


@dataclass
class Dawn:
    """node: the program. folder: for what goes to the processes and what they write."""

    node: str
    driver: Driver
    folder: Path
    _runs: int = field(default=0, init=False)

    def _put(self, bundle: Bundle) -> Path:
        self._runs += 1
        folder = self.folder / str(self._runs)
        folder.mkdir()
        (folder / "bundle.json").write_text(json.dumps(bundle.document))
        (folder / "block.bin").write_bytes(bundle.block)
        return folder

    def compile(self, bundle: Bundle) -> dict[str, Any]:
        """Return compileAll's result (bundle_runner.mjs), on Dawn's backend without a GPU, which has every feature."""
        folder = self._put(bundle)
        more = ("all",) if ALL else ()
        return ask_dawn(self.node, {}, str(folder), str(folder / "result"), "null", "compile", *more)[1]

    def run(self, bundle: Bundle) -> Ran:
        """Every case, on the Vulkan driver, in processes of CASES_PER_PROCESS cases at most."""
        folder, count = self._put(without_unused(bundle)), len(bundle.document["cases"])
        parts = min(count, max(PROCESSES, -(-count // CASES_PER_PROCESS)))

        def part(first: int) -> list[dict[str, Any]]:
            output = folder / f"result-{first}"
            arguments = (str(folder), str(output), "vulkan", str(first), str(parts))
            try:
                return ask_dawn(self.node, self.driver.environment, *arguments)
            except NodeEnded as error:
                done = output.read_text().count("\n") - 1 if output.exists() else 0
                one = bundle.document["cases"][first::parts][done]
                raise NodeEnded(f"in {one['name']}, {one['profile']}: {error}") from None

        with ThreadPoolExecutor(PROCESSES) as threads:
            found = list(threads.map(part, range(parts)))
        used = [lines[-1] for lines in found]
        results = [result for lines in found for result in lines[1:-1]]
        assert len(results) == count
        return Ran(results, sum(u["cpu_s"] for u in used), max(u["peak_bytes"] for u in used))


class NodeEnded(Exception):
    """A process that did not do what it was asked, with the end of what it said."""


def ask_dawn(node: str, environment: dict[str, str], *arguments: str) -> list[dict[str, Any]]:
    """The lines that dawn.mjs writes, the adapter's first; arguments: as it takes them."""
    command = [node, str(HERE / "dawn.mjs"), *arguments]
    whole = {**os.environ, **environment}
    run = subprocess.run(command, env=whole, capture_output=True, text=True, timeout=SECONDS)
    if run.returncode != 0:
        raise NodeEnded(f"node ended with {run.returncode}: {run.stderr[-2000:]}")
    return [json.loads(line) for line in Path(arguments[1]).read_text().splitlines()]


def front_driver(compiler: str, folder: Path, definition: str, driver: str) -> dict[str, str]:
    """The environment in which Vulkan finds front_driver.c, compiled with -D`definition`, in front of a driver."""
    library, manifest = folder / "front_driver.so", folder / "front_driver.json"
    command = [
        compiler,
        "-shared",
        "-fPIC",
        f"-D{definition}",
        "-o",
        str(library),
        str(HERE / "front_driver.c"),
        "-ldl",
    ]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    icd = {"library_path": str(library), "api_version": "1.3.0"}
    manifest.write_text(json.dumps({"file_format_version": "1.0.0", "ICD": icd}))
    return {"WGRAD_VULKAN_DRIVER": driver, "VK_ICD_FILENAMES": str(manifest)}


def _environments(folder: Path) -> Iterator[dict[str, str]]:
    """Return the environments of drivers to try, the best first.

    The one that the environment names; where there is a C compiler, Mesa's lavapipe: the system's first (Debian 12's
    compiles in half the time), in a run of all tests the fetched one; SwiftShader.
    """
    if "VK_ICD_FILENAMES" in os.environ:
        yield {}
        return
    compiler = c_compiler()
    lavapipes = [LAVAPIPE, *([] if MESA.missing else [str(FETCHED)])]
    for lavapipe in (lavapipes[::-1] if ALL else lavapipes) if compiler else ():
        definition = f"WORKGROUP_BYTES={MOST_WORKGROUP_BYTES}"
        yield {**front_driver(str(compiler), folder, definition, lavapipe), **LAVAPIPE_SETTINGS}
    yield from ({"VK_ICD_FILENAMES": file} for file in SWIFTSHADER if Path(file).exists())


def find_driver(node: str, folder: Path) -> Driver | None:
    """The first driver that Dawn takes; it refuses some."""
    for environment in _environments(folder):
        try:
            (told,) = ask_dawn(node, environment, "", str(folder / "probe"), "vulkan", "probe")
        except NodeEnded:
            continue
        return Driver(environment, told["adapter"], told["float16"], told["workgroup_bytes"])
    return None
