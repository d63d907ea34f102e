"""The self-test itself: it covers the contract, passes on the reference, and finds what is broken."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.case_results import assert_case
from wgrad.autograd.operators import OPERATORS
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest.attention import attention_case
from wgrad.autograd.selftest.case import BF16, Case, widen_inputs
from wgrad.autograd.selftest.cases import cases
from wgrad.autograd.selftest.probe import report
from wgrad.autograd.selftest.run import check_case, expected_outputs, judge, run_selftest
from wgrad.device.contract import Device
from wgrad.device.errors import DeviceError, DeviceLost


def test_every_operator_has_a_case() -> None:
    assert {case.op for case in cases()} == {*OPERATORS, "storage"}


def test_every_operator_has_a_float16_case() -> None:
    only_float32 = {
        "grad_norm",
        "clip",
        "adamw",
        "sample",
        "advance",
        "group_by_expert",
        "place_experts",
        "keep_experts",
        "round_weight",
    }
    half = {case.op for case in cases() if "float16" in case.dtype}
    assert {case.op for case in cases()} - half == only_float32
    assert not any("float16" in case.dtype.replace("bfloat16", "") for case in cases(float16=False))


def test_an_output_that_is_zero_may_have_the_rounding_of_what_cancels_in_it() -> None:
    """dq of a query with one key. Another order of the sums in do v and in do o leaves some 1e-7 of it."""
    case = attention_case("one token", (1, 1, 2, 1, 64), BF16, backward=True)
    expected = expected_outputs(case)
    assert not expected.oracle["dq"].any()
    for off, right in ((1e-7, True), (1e-4, False)):
        found = {name: value.astype(expected.dtypes[name]) for name, value in expected.oracle.items()}
        found["dq"] += np.asarray(off, found["dq"].dtype)
        assert judge(case, expected, found).ok == right


def test_inputs_are_the_same_every_time() -> None:
    case = cases()[0]
    for first, second in zip(case.inputs().values(), case.inputs().values()):
        np.testing.assert_array_equal(first, second)


def test_the_oracle_computes_in_float64() -> None:
    for case in cases():
        inputs = widen_inputs(case.inputs())
        weight = inputs.get("weight") if case.op == "dequantize" else None
        if case.op == "storage" or "cast" in case.name:
            continue
        if weight is not None and all(a.dtype.kind in "iu" for a in weight.arrays().values()):
            continue  # of integers alone: its values are those of float32
        for name, value in case.call(ReferenceDevice(), inputs).items():
            assert value.dtype.kind in "iu" or value.dtype == np.float64, (case.name, name)


class _Calls(ReferenceDevice):
    """Names the operators that were called without a `dtype`."""

    def __init__(self) -> None:
        super().__init__()
        self.bare: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in TAKES_DTYPE:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            given = OPERATORS[name].signature.bind(*args, **kwargs).arguments
            if given.get("dtype") is None:
                self.bare.add(name)
            return found(*args, **kwargs)

        return call


TAKES_DTYPE = {name for name, op in OPERATORS.items() if "dtype" in op.defaults}


def test_the_reference_passes_and_every_operator_with_a_dtype_has_a_case_without_one() -> None:
    """Its float32 against its float64; torch is the judge of both in test_against_torch.py. Of the latter cases those
    with operands of two dtypes, where the operator takes them: that is where devices could differ."""
    device = _Calls()
    failed = [r for r in run_selftest(device) if not r.ok]
    assert not failed, failed
    assert device.bare == TAKES_DTYPE and TAKES_DTYPE >= {"gemm", "linear_quantized", "rms_norm", "embedding"}


def test_a_result_of_another_dtype_is_found() -> None:
    (case,) = (c for c in cases() if c.name == "gemm_nt/mixed, default dtype/41x37x67/float16*float32")

    class Widening(ReferenceDevice):
        def gemm(self, a, b, *, dtype=None, **options):  # type: ignore[no-untyped-def]
            return super().gemm(a, b, dtype=dtype or np.float32, **options)  # type: ignore[misc]

    assert_case(case, ReferenceDevice())
    result = check_case(case, Widening())
    assert not result.ok and result.message == "y is float32, should be float16"


class Broken(ReferenceDevice):
    """Wrong in small ways, each of which the self-test must find."""

    def rms_norm_backward(self, dy, x, weight, rstd, *, residual_grad=None, need_dweight=True, dtype=None):  # type: ignore[no-untyped-def]
        return super().rms_norm_backward(dy, x, weight, rstd, need_dweight=need_dweight, dtype=dtype)  # type: ignore[misc]

    def attention(self, q, k, v, doc_start, cache_len, *, window=0, **options):  # type: ignore[no-untyped-def]
        return super().attention(q, k, v, doc_start, cache_len, window=window + 1 if window else 0, **options)  # type: ignore[misc]

    def rope(self, x, cos, sin, positions, *, inverse=False, **options):  # type: ignore[no-untyped-def]
        return super().rope(x, cos, sin, positions, **options)  # type: ignore[misc]

    def silu(self, x):  # type: ignore[no-untyped-def]
        return (super().silu(x) * 1.00001).astype(x.dtype)  # type: ignore[misc]

    def gelu(self, x):  # type: ignore[no-untyped-def]
        raise RuntimeError("shader does not compile")

    def softmax(self, x):  # type: ignore[no-untyped-def]
        return np.full_like(x, np.nan)

    def dropout(self, x, p, seed, stream):  # type: ignore[no-untyped-def]
        return super().dropout(x, p, seed, stream + 1)  # type: ignore[misc]

    def sum_rows(self, x, *, out=None, accumulate=False):  # type: ignore[no-untyped-def]
        return super().sum_rows(x, out=out)  # type: ignore[misc]


@pytest.mark.parametrize(
    "name",
    [
        "rms_norm_backward/residual/41x123/float32>float32",
        "rms_norm_backward/residual/41x123/float16>float16",
        "attention/window/2x70x4x2x64/float32",
        "attention/window/2x70x4x2x64/float16",
        "rope/backward/37x3x64/float32",
        "silu/7x123/float32",
        "softmax/5x123/float16",
        "dropout/7x123/float32",
        "sum_rows accumulate/7x123/float32",
    ],
)
def test_a_broken_operator_is_found(name: str) -> None:
    (case,) = (c for c in cases() if c.name == name)
    assert_case(case, ReferenceDevice())
    assert not check_case(case, Broken()).ok


def test_an_operator_that_raises_is_one_failed_row() -> None:
    results = run_selftest(Broken(), only="gelu/")
    assert results and not any(r.ok for r in results)
    assert all(r.message == "RuntimeError: shader does not compile" and r.error == float("inf") for r in results)


def test_a_case_that_loses_the_device_ends_the_self_test(capsys: pytest.CaptureFixture[str]) -> None:
    """The cases behind it could only fail. A check that found it is kept: the next would lose the GPU again."""

    class Lost(ReferenceDevice):
        def gelu(self, x):  # type: ignore[no-untyped-def]
            raise DeviceLost("the device was lost")

    done = list[Any]()
    with pytest.raises(DeviceLost, match="^gelu/.*: the device was lost$"):
        run_selftest(Lost(), selected=[c for c in cases() if c.op in ("silu", "gelu")], progress=done.append)
    assert done and {result.op for result in done} == {"silu"}
    assert report(Lost, [c for c in cases() if c.op == "gelu"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["keep"] is True and said["passed"] is False and said["reason"].startswith("gelu/")


def test_a_check_without_a_device_is_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    def make_device() -> Device:
        raise DeviceError("no adapter now")

    assert report(make_device, []) == 0
    assert json.loads(capsys.readouterr().out) == {"passed": False, "reason": "no adapter now", "keep": False}


def test_a_check_of_a_gpu_compiles_at_once_and_makes_inputs_once(capsys: pytest.CaptureFixture[str]) -> None:
    order = list[str]()

    class Compiling(ReferenceDevice):
        def dry_run(self) -> Any:
            return Compiling()

        def prepare(self, dry: Any, progress: Any = None) -> int:
            order.append("compile")
            return 0

    def build(rng: np.random.Generator) -> dict[str, Any]:
        order.append("inputs")
        return {"x": np.ones((2, 3), np.float32)}

    def call(device: Any, x: Any) -> dict[str, Any]:
        order.extend(["call"] * isinstance(device, Compiling))
        return {"y": x["x"]}

    selected = [Case(name, "silu", "forward", "float32", "2x3", build, call) for name in ("one", "two")]
    assert report(Compiling, selected) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True
    assert order == ["inputs"] * 2 + ["call"] * 2 + ["compile"] + ["call"] * 2  # first on the dry run


def test_a_missing_output_is_found() -> None:
    full = cases()[0]

    def call(device: Device, x: dict) -> dict:  # type: ignore[type-arg]
        return full.call(device, x) if type(device) is ReferenceDevice else {}

    case = Case("x", "gemm", "forward", "float32", "", full.build, call)
    with pytest.raises(KeyError, match="outputs"):
        check_case(case, Broken())
