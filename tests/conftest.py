"""Fixtures of all tests, such as devices, and the selection and order of tests."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import forks, llvm_passes, tools
from tests.case_results import assert_case
from tests.sweeps import sweep_part
from tests.wgsl.rolled import quick_to_compile
from wgrad.autograd.bind import bind
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.select_device import select_device
from wgrad.autograd.selftest.case import Case, Inputs, Outputs
from wgrad.device.contract import Device
from wgrad.device.errors import DeviceError, DeviceUnavailable
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.runtime import adapters
from wgrad.wgsl.runtime.compile import Compiler

os.environ.setdefault("XDG_RUNTIME_DIR", "/tmp")  # if it is not set, Mesa warns on stderr
# Vectors of 128 bits compile fastest. `pytest_runtest_setup` sets the optimization.
os.environ.setdefault("LP_NATIVE_VECTOR_WIDTH", "128")
# Do not check operators before a run: they are tested one by one, and the first line would depend on the cache.
os.environ.setdefault("WGRAD_VERIFY", "off")


# --fast leaves out oracles, other compilers, counted instructions, and whole runs that are killed or on full disks. It
# runs this many parameter sets of every other test.
NOT_FAST = ["test_oracle_*", "test_against_*", "fuzz", "portability", "test_execut*", "test_auto.py"]
NOT_FAST += ["test_*_isa.py", "test_access_*", "test_hiprtc.py", "test_fault*", "test_interrupts.py", "test_plan.py"]
NOT_FAST += ["test_objects.py", "test_resume.py", "test_evaluation.py", "test_package.py", "test_errors.py"]
NOT_FAST += ["test_training.py", "test_ranks.py", "test_every_kernel.py", "test_self_check.py"]
NOT_FAST += ["test_offload.py", "test_fit.py", "test_stream_weights.py", "test_bench_scripts.py"]
FAST_SETS = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    text = f"a part: no oracles, {FAST_SETS} sets of parameters of a test, and what failed last time"
    parser.addoption("--fast", action="store_true", help=text)
    parser.addoption("--all", action="store_true", help="also what runs weekly and before a release: the marker `all`")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    left_out = config.getoption("--fast") and any(map(collection_path.match, NOT_FAST))
    return True if left_out else None


# The order in which tests run. Each worker begins with its share of them.
FOLDERS = ("train", "autograd", "device", "fuzz", "tests", "wgsl", "portability", "hip")


def _own_cache(config: pytest.Config) -> None:
    """Use a cache folder for this run, apart from the user's, and remove it at the end.

    Compiled shaders stay in the usual place, because they take longest to make.
    """
    usual = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    with suppress(OSError):  # Mesa does not make the folder that this variable names, and then caches nothing
        os.makedirs(os.environ.setdefault("MESA_SHADER_CACHE_DIR", usual), exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = folder = tempfile.mkdtemp(prefix="wgrad-tests-")
    config.add_cleanup(partial(shutil.rmtree, folder, ignore_errors=True))


def _keep_allocator() -> None:
    """Keep the Makefile's jemalloc from programs that tests start: some have their memory limited or measured."""
    if "libjemalloc" in os.environ.get("LD_PRELOAD", ""):
        del os.environ["LD_PRELOAD"]
        os.environ.pop("MALLOC_CONF", None)


def pytest_configure(config: pytest.Config) -> None:
    _keep_allocator()
    if not hasattr(config, "workerinput"):  # workers inherit the environment of the process that starts them
        _own_cache(config)
        llvm_passes.load(tools.c_compiler(), Path(os.environ["XDG_CACHE_HOME"]))
    os.environ.setdefault("GALLIVM_PERF", "nopt")
    if os.environ.get("WGRAD_REQUIRE_TOOLS") == "1" and (lacking := [t.missing for t in tools.REQUIRED if t.missing]):
        raise pytest.UsageError("WGRAD_REQUIRE_TOOLS=1, but " + "; ".join(lacking))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Return one worker more than cores: tests wait for processes, sockets and clocks for a tenth of their time."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # xdist reads this variable
    return 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


# Packages that take seconds to import in each process: tests/tools.py imports them when a test uses them.
ORACLES = ("torch", "transformers", "peft", "trl", "bitsandbytes", "xllamacpp", "openai", "tensorboard")
imported_by_collection = set[str]()
threads_started_by_collection = 0
ORACLES_OF_MANY_FILES = ("torch", "transformers", "peft")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Freeze the million objects of imports and collection, with which a garbage collection takes up to 0.5 s."""
    global threads_started_by_collection
    threads = forks.threads()  # a worker of pytest-xdist has one of its own
    gc.disable()
    try:
        return (yield)
    finally:
        imported_by_collection.update(name for name in ORACLES if name in sys.modules)
        threads_started_by_collection = forks.threads() - threads
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_before_forks(session: pytest.Session) -> None:
    """Import what most tests of oracles use once, in the process that forks those that run tests (tests/forks.py)."""
    if any(item.get_closest_marker("oracle") for item in session.items):
        for name in ORACLES_OF_MANY_FILES:
            if importlib.util.find_spec(name):
                importlib.import_module(name)
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    providers = sys.modules.get("hypothesis.internal.conjecture.providers")
    if hasattr(providers, "Constants"):  # hypothesis would parse all modules for constants to try: 3 s in each worker
        providers._get_local_constants = providers.Constants  # type: ignore[union-attr]
    chosen = set(items)
    if tools.EXECUTOR.missing:
        chosen = {item for item in items if item.get_closest_marker("executor") is None}
    if not config.getoption("--all"):
        chosen = {item for item in chosen if item.get_closest_marker("all") is None}
        sweeps = sweep_part(_one_node_id(item) for item in items)
        chosen = {item for item in chosen if _one_node_id(item) not in sweeps}
    if config.getoption("--fast"):
        failed = config.cache.get("cache/lastfailed", {}) if hasattr(config, "cache") else {}
        chosen &= fast_part(items, failed)
    if len(chosen) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = sorted((item for item in items if item in chosen), key=_place)


def _place(item: pytest.Item) -> tuple[int, list[int]]:
    """Return the sort key of a test: its folder, then its file.

    Files of training come in reverse order. Those from `data` down launch few shaders, so the next worker gets them.
    """
    folder, letters = item.path.parent.name, [*map(ord, item.path.name)]
    return FOLDERS.index(folder), [-letter for letter in letters] if folder == "train" else letters


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Iterator[None]:
    """Print, at the end of a run, what was not tested, and where a run of most tests spent its time."""
    yield
    reports = [report for group in terminalreporter.stats.values() for report in group]
    if lines := tools.slowest_files(reports):
        terminalreporter.section("files that took longest")
        for line in lines:
            terminalreporter.line(line)
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = [r.longrepr[2] if isinstance(r.longrepr, tuple) else str(r.longrepr) for r in skipped]
    if lines := tools.report(reasons):
        terminalreporter.section("not tested on this machine")
        for line in lines:
            terminalreporter.line(line)


def _one_node_id(item: pytest.Item) -> str:
    """Return the node id, independent of the folder in which pytest was started."""
    return f"{_file(item.path)}::{item.nodeid.partition('::')[2]}"


@cache
def _file(path: Path) -> str:
    return f"tests/{path.relative_to(Path(__file__).parent).as_posix()}"


def fast_part(items: Iterable[pytest.Item], failed: Collection[str]) -> set[pytest.Item]:
    """Return FAST_SETS parameter sets of each test, evenly spread, and the tests in `failed`, without oracles.

    Of the self-test's cases, return one for each operator and direction.
    """
    groups: dict[Any, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("oracle") is None:
            values = item.callspec.params.values() if hasattr(item, "callspec") else ()
            case = next((value for value in values if isinstance(value, Case)), None)
            kind = (case.op, case.direction) if case else None
            groups.setdefault((item.nodeid.partition("[")[0], kind), []).append(item)
    chosen = {item for group in groups.values() for item in group if item.nodeid in failed}
    for (_, kind), group in groups.items():
        count = min(len(group), 1 if kind else FAST_SETS)
        chosen.update(group[i * len(group) // count] for i in range(count))
    return chosen


@cache
def _wgpu_device() -> Device | str:
    """Return one wgpu device for all tests, or the reason why there is none."""
    try:
        return select_device("wgpu")
    except DeviceUnavailable as error:
        return str(error)


_begun = list[str]()  # first test of this process
_file_before: Path | None = None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Freeze the objects that each test file leaves: with torch, or the syntax trees of all files, a garbage collection
    takes half a second."""
    global _file_before
    if item.path != _file_before:
        _file_before = item.path
        gc.collect()
        gc.freeze()
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Choose, once per process, whether the software driver optimizes shaders.

    Compilation dominates tests of shaders and programs: without LLVM's optimization they take 20 % less CPU time. Tests
    of training run each shader hundreds of times: with it they take 10 to 40 % less. So the process that begins with
    the first of them optimizes. One that begins with some of the last continues with tests of shaders, and does not.
    """
    if _begun:
        return
    _begun.append(item.nodeid)
    if item is item.session.items[0] and item.path.is_relative_to(Path(__file__).parent / "train"):
        with pytest.MonkeyPatch.context() as patch:
            if os.environ["GALLIVM_PERF"] == "nopt":
                patch.delenv("GALLIVM_PERF")
            _wgpu_device()


def require_wgpu() -> Device:
    """Return the wgpu device. If there is none, skip the test, or fail it if WGRAD_REQUIRE_TOOLS=1."""
    device = _wgpu_device()
    if isinstance(device, str):
        tools.give_up(device)
    return device


def share_pipelines(patch: pytest.MonkeyPatch) -> None:
    """Let new wgpu devices share the driver's device and the pipelines of `require_wgpu`, so that none compiles twice.

    Each device has its own memory, counters and switches.
    """
    first: Any = require_wgpu()

    def compiler(*given: Any) -> Compiler:
        made = Compiler(*given)
        made._pipelines = first._compiler._pipelines
        return made

    patch.setattr(adapters, "open_device", lambda adapter: first._device)
    patch.setattr("wgrad.wgsl.runtime.runtime.Compiler", compiler)


def wgpu_sibling() -> Any:
    """Return a new wgpu device that shares pipelines (`share_pipelines`)."""
    with pytest.MonkeyPatch.context() as patch:
        share_pipelines(patch)
        return bind(WgpuDevice)()


@pytest.fixture
def shared_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share pipelines in tests whose commands open a wgpu device themselves."""
    share_pipelines(monkeypatch)


@pytest.fixture(params=["cpu", "wgpu"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Yield each device of this machine in turn."""
    chosen = ReferenceDevice() if request.param == "cpu" else require_wgpu()
    yield chosen
    chosen.synchronize()


@pytest.fixture
def wgpu_device() -> Device:
    """Return the wgpu device."""
    return require_wgpu()


@pytest.fixture(scope="session")
def emulator(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the emulator of AMD GPUs, built in pytest's cache or $WGRAD_EMULATOR_DIR, for other processes too.

    Without clang or hip-python, tests that need it are skipped.
    """
    from tests.hip.emulator.harness import start

    kept, cache = os.environ.get("WGRAD_EMULATOR_DIR"), getattr(pytestconfig, "cache", None)
    folder = Path(kept) if kept else cache.mkdir("emulator") if cache else tmp_path_factory.mktemp("emulator")
    try:
        return start(folder)
    except FileNotFoundError as error:
        tools.give_up(tools.CLANG.missing or str(error))
    except DeviceError as error:
        if "not installed" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture
def cpu() -> ReferenceDevice:
    """Return a new NumPy reference device."""
    return ReferenceDevice()


@pytest.fixture
def as_written() -> None:
    """Mark a test of shaders that must be those of a real run (see `_quick_to_compile`)."""


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Leave out fsync, which takes 2 to 5 ms for each of a run's 60 files, since no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def _quick_to_compile(request: pytest.FixtureRequest) -> Iterator[None]:
    """Shorten the shaders of GEMM and attention, since code generation dominates their tests on a software driver.

    Programs that tests start, and tests with `as_written`, have the shaders of a real run. This does not use the test's
    monkeypatch: a test that calls its `undo` would compile large tiles from then on.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "as_written" not in request.fixturenames:
            quick_to_compile(patch.setattr)
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261121)


@pytest.fixture
def compare() -> Callable[..., None]:
    """Return compare(device, call, inputs), which checks `call(device, inputs)` as the self-test does."""

    def run(
        device: Any,
        call: Callable[[Any, Inputs], Outputs],
        inputs: Inputs,
        *,
        backward: bool = False,
        ulps: float = 4.0,
    ) -> None:
        direction = "backward" if backward else "forward"
        assert_case(Case("", "", direction, "", "", lambda rng: inputs, call, ulps), device)

    return run


@pytest.fixture
def nf4_values() -> Callable[[Any, Any], np.ndarray]:
    """Return nf4_values(packed, state), which decodes a weight of bitsandbytes to float32 by its formula, in NumPy.

    bitsandbytes' `dequantize_4bit` cannot be the oracle for all shapes: on CPUs with AVX-512, version 0.50.2 is wrong
    for most shapes whose rows are not whole blocks. For whole blocks, tests/autograd/test_against_bitsandbytes.py
    compares it with this formula.
    """

    def values(packed: Any, state: Any) -> np.ndarray:
        absmax, count = state.absmax.numpy(), int(np.prod(state.shape))
        if state.nested:
            outer = np.repeat(state.state2.absmax.numpy(), state.state2.blocksize)[: absmax.size]
            absmax = state.state2.code.numpy()[absmax] * outer + np.float32(state.offset)
        data = packed.numpy().reshape(-1)
        levels = state.code.numpy()[np.stack([data >> 4, data & 15], axis=1).reshape(-1)[:count]]
        return (levels * np.repeat(absmax, state.blocksize)[:count]).reshape(tuple(state.shape))

    return values
