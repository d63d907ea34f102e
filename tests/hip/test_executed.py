"""The compiled code objects, executed: the committed table keeps its limits, and a few cases are executed again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import tools
from tests.hip.executor.call import Out, call
from tests.hip.executor.code_object import ExecutorError
from tests.hip.executor.device import ExecutedDevice, shipped
from tests.hip.executor.kernel import Kernel
from tests.hip.executor.operators import all_cases, execute
from tests.hip.executor.table import held
from tests.hip.executor.tinygrad_emulator import missing
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.errors import DeviceError
from wgrad.hip.runtime.architectures import SHIPPED
from wgrad.hip.runtime.launch import Long

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
needs_executor = pytest.mark.executor


def test_results_are_within_the_limits_of_the_self_test() -> None:
    with held("hip_executed") as rows:
        assert [(r["arch"], r["kernel"], r["worst"]) for r in rows if not r["worst"] <= 1] == []


def test_the_order_of_waves_changes_nothing() -> None:
    with held("hip_executed") as rows:
        assert [(r["arch"], r["kernel"]) for r in rows if r["orders"] != ["fwd", "rev"] or not r["same_bits"]] == []


@pytest.fixture(scope="module", params=SHIPPED)
def device(request: pytest.FixtureRequest) -> Any:
    if lacking := missing(request.param):
        tools.give_up(lacking)
    return ExecutedDevice(request.param)


@needs_executor
@pytest.mark.parametrize("architecture", SHIPPED)
def test_executed_kernels_compute_what_numpy_does(architecture: str) -> None:
    """The whole way: code object, arguments, waves, instructions, results. rows divide into no whole waves."""
    if lacking := missing(architecture):
        tools.give_up(lacking)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((3, 41)).astype(np.float32)
    d = ExecutedDevice(architecture)
    np.testing.assert_array_equal(d.download(d.scale(d.upload(x), 1.5)), x * np.float32(1.5))
    a, b = (rng.standard_normal(s).astype(np.float16) for s in ((5, 40), (8, 40)))
    product = d.download(d.gemm(d.upload(a), d.upload(b), trans_b=True, dtype=np.float32))
    np.testing.assert_allclose(product, a.astype(np.float64) @ b.astype(np.float64).T, atol=1e-5)
    assert d.execution.kernels[0] == "elementwise" and len(d.execution.kernels) == 2


@needs_executor
@pytest.mark.parametrize("name", CASES)
def test_executed_cases_are_within_their_limits(device: Any, name: str) -> None:
    case = next(c for c in all_cases() if c.name == name)
    worst, same_bits = execute(device, case)
    assert worst <= 1 and same_bits
    assert device.execution.kernels


@needs_executor
@pytest.mark.parametrize("block_size", [32, 4096])
def test_executed_nf4_codes_equal_the_references(device: Any, block_size: int) -> None:
    x = np.random.default_rng(5).standard_normal((67, 131)).astype(np.float32)
    wanted, found = ReferenceDevice().quantize(x, block_size), device.quantize(device.upload(x), block_size)
    np.testing.assert_array_equal(device.download(found.absmax), wanted.absmax)
    np.testing.assert_array_equal(device.download(found.packed), wanted.packed)


@needs_executor
def test_an_access_out_of_bounds_is_an_error(device: Any) -> None:
    x, y = device.zeros((16,)), device.zeros((64,))
    with pytest.raises(DeviceError, match="copy .*memory access fault.*from the start of an array of 64 bytes"):
        device.launch("storage", "copy", [x, y, Long(y.nbytes)], (1, 1, 1))


@needs_executor
def test_arguments_that_are_not_the_kernels_are_an_error(device: Any) -> None:
    x = device.zeros((16,))
    with pytest.raises(DeviceError, match="copy: other arguments than the 24 bytes that the kernel declares"):
        device.launch("storage", "copy", [x, x, 64], (1, 1, 1))
    kernel = Kernel(shipped("storage", device.architecture), "copy")
    with pytest.raises(ExecutorError, match="copy takes 3 arguments .*, 1 were given"):
        call(kernel, (1, 1, 1), 256, [Out((16,), np.float32)])


@needs_executor
def test_memory_that_was_not_written_reads_as_nan(device: Any) -> None:
    x = device.zeros((64,))
    del x
    assert np.isnan(device.download(device.scale(device.empty((64,)), 2.0))).all()


def test_without_a_checkout_it_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYGRAD_DIR", "/nowhere")
    assert "git clone https://github.com/tinygrad/tinygrad" in missing() and "TINYGRAD_DIR" in missing()
    monkeypatch.delenv("TINYGRAD_DIR")
    assert "git -C tinygrad checkout" in missing()
