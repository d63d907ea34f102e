"""The compiled code objects, executed: the committed table keeps its limits, and a few cases are executed again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.errors import DeviceError
from wgrad.hip.runtime.build import CLANG
from wgrad.hip.runtime.runtime import Long

BENCH = Path(__file__).parents[2] / "bench"
ROWS = [json.loads(line) for line in (BENCH / "results" / "hip_executed.jsonl").read_text().splitlines()]
ARCHITECTURES = ("gfx90a", "gfx942", "gfx1100")
# One of each family, each with a size that divides nothing.
CASES = (
    "rms_norm/plain/3x1003/float16>float16",
    "rms_norm_backward/residual/41x123/float32>float32",
    "swiglu_backward/7x123/bfloat16",
    "embedding_backward/71x37,123/float16",
    "nf4_quantize/double block 64/35x67/float32",
    "adamw/applied/1003",
    "sample/all/123/0.37",
    "linear_cross_entropy/dx dweight/37x123x41/bfloat16",
    "rope_append/prefill/2x5x3x10/bfloat16",
)
needs_tools = pytest.mark.skipif(
    not os.environ.get("WGRAD_RUN_HSACO") or "TINYGRAD_DIR" not in os.environ or shutil.which(CLANG) is None,
    reason=f"needs {CLANG}, $WGRAD_RUN_HSACO (run_hsaco.py) and $TINYGRAD_DIR (a checkout of tinygrad)",
)


def test_table_has_the_same_kernels_for_every_architecture(bench: Callable[[str], Any]) -> None:
    """Products and attention on the matrix units choose by card; the other tables have all of those."""
    elsewhere = bench("hip_execute").ELSEWHERE
    kernels = [
        {r["kernel"] for r in ROWS if r["arch"] == a and not r["source"].startswith(elsewhere)} for a in ARCHITECTURES
    ]
    assert len(kernels[0]) > 30 and kernels[0] == kernels[1] == kernels[2]
    for arch in ARCHITECTURES:
        assert sum(r["arch"] == arch and r["source"].startswith(elsewhere) for r in ROWS) > 20


def test_every_kernel_was_executed() -> None:
    assert [(r["arch"], r["kernel"], r["not_executed"]) for r in ROWS if "not_executed" in r] == []


def test_results_are_within_the_limits_of_the_self_test() -> None:
    assert [(r["arch"], r["kernel"], r["worst"]) for r in ROWS if not r["worst"] <= 1] == []


def test_the_order_of_waves_changes_nothing() -> None:
    assert [(r["arch"], r["kernel"]) for r in ROWS if r["orders"] != ["fwd", "rev"] or not r["same_bits"]] == []


@pytest.fixture(scope="module", params=ARCHITECTURES)
def device(
    bench: Callable[[str], Any], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    return bench("hip_executor").ExecutedDevice(request.param, tmp_path_factory.mktemp("objects"))


@needs_tools
@pytest.mark.parametrize("name", CASES)
def test_case(bench: Callable[[str], Any], device: Any, name: str) -> None:
    script = bench("hip_execute")
    case = next(c for c in script.all_cases() if c.name == name)
    worst, same_bits = script.execute(device, case)
    assert worst <= 1 and same_bits
    assert device.execution.kernels


@needs_tools
@pytest.mark.parametrize("block_size", [32, 128, 4096])
def test_nf4_bit_for_bit(device: Any, block_size: int) -> None:
    x = np.random.default_rng(5).standard_normal((67, 131)).astype(np.float32)
    wanted, found = ReferenceDevice().nf4_quantize(x, block_size), device.nf4_quantize(device.upload(x), block_size)
    np.testing.assert_array_equal(device.download(found.absmax), wanted.absmax)
    np.testing.assert_array_equal(device.download(found.packed), wanted.packed)


@needs_tools
def test_an_access_out_of_bounds_is_an_error(device: Any) -> None:
    x, y = device.zeros((16,)), device.zeros((64,))
    with pytest.raises(DeviceError, match="copy .*memory access fault"):
        device.launch("storage", "copy", [x, y, Long(y.nbytes)], (1, 1, 1))


@needs_tools
def test_arguments_that_are_not_the_kernels_are_an_error(device: Any) -> None:
    x = device.zeros((16,))
    with pytest.raises(DeviceError, match="copy: 20 bytes of arguments, the kernel declares 24"):
        device.launch("storage", "copy", [x, x, 64], (1, 1, 1))


@needs_tools
def test_memory_that_was_not_written_reads_as_nan(device: Any) -> None:
    x = device.zeros((64,))
    del x
    assert np.isnan(device.download(device.scale(device.empty((64,)), 2.0))).all()
