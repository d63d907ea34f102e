"""Arrays that start at no multiple of 16 bytes. The contract's views never do; products and attention take them
nevertheless, by other kernels than those with wide accesses, which the emulated GPU refuses. One array at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.case_results import assert_ok
from wgrad.autograd.selftest.attention import attention_case
from wgrad.autograd.selftest.case import F16, Case, upload_inputs
from wgrad.autograd.selftest.experts import grouped_case
from wgrad.autograd.selftest.gemm import gemm_case
from wgrad.autograd.selftest.run import expected_outputs, judge, to_host

FORWARD = attention_case("unaligned", (1, 5, 2, 1, 64), F16, keys=40, cache_len=35)
BACKWARD = attention_case("unaligned", (1, 37, 2, 1, 64), F16, backward=True)
PRODUCT = gemm_case("unaligned", 40, 136, 72, F16, trans_b=True)
EXPERTS = grouped_case("forward", "unaligned", (9, 3, 2, 40, 72), F16, weight=F16)
DECODED = grouped_case("forward", "unaligned", (9, 3, 2, 40, 64), F16, format="nf4", dtype=F16)
TERM = grouped_case("forward", "unaligned", (9, 3, 2, 40, 72), F16, weight=F16, add=True)
GRADIENT = grouped_case("weight_grad", "unaligned", (9, 3, 2, 36, 40), F16)
WIDE = (
    "attention_forward",
    "attention_backward_dq",
    "gemm_f16_nt_small",
    "grouped_f16_nt",
    "grouped_nf4_f16_nt",
    "grouped_grad_mix",
)


def shifted(device: Any, host: np.ndarray) -> Any:
    """A view of a larger array, one element from its start."""
    memory = device.upload(np.concatenate([np.zeros(1, host.dtype), host.ravel()]))
    return device.view(memory, host.shape, 1)


@pytest.mark.parametrize(
    ("case", "which"),
    [(FORWARD, n) for n in "qkv"]
    + [(BACKWARD, n) for n in ("q", "k", "v", "do", "o")]
    + [(PRODUCT, n) for n in "ab"]
    + [(EXPERTS, "x"), (EXPERTS, "weight"), (DECODED, "x"), (GRADIENT, "dy"), (GRADIENT, "x")],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_a_misaligned_array_takes_the_narrow_kernels(
    emulator: Any, hip_device: Any, launched: list[tuple[str, str]], case: Case, which: str
) -> None:
    """The wide kernels serve the others, and leave this one alone."""
    inputs = case.inputs()
    case.call(hip_device, upload_inputs(hip_device, inputs))
    assert any(name in WIDE for pair in launched for name in pair)
    launched.clear()
    arrays = upload_inputs(hip_device, inputs) | {which: shifted(hip_device, inputs[which])}
    result = judge(case, expected_outputs(case), to_host(case, hip_device, case.call(hip_device, arrays)))
    assert_ok(result)
    assert not any(name in WIDE for pair in launched for name in pair)


def test_a_misaligned_term_of_experts_is_added_one_by_one(hip_device: Any) -> None:
    inputs = TERM.inputs()
    arrays = upload_inputs(hip_device, inputs) | {"add": shifted(hip_device, inputs["add"])}
    result = judge(TERM, expected_outputs(TERM), to_host(TERM, hip_device, TERM.call(hip_device, arrays)))
    assert_ok(result)


def test_gradients_of_experts_are_added_to_a_misaligned_array(hip_device: Any) -> None:
    d, inputs = hip_device, GRADIENT.inputs()
    arrays = upload_inputs(d, inputs)
    out = shifted(d, np.ones((3, 36, 40), np.float32))
    d.grouped_weight_grad(arrays["dy"], arrays["x"], arrays["start"], out=out, accumulate=True)
    wanted = d.download(d.grouped_weight_grad(arrays["dy"], arrays["x"], arrays["start"]))
    np.testing.assert_allclose(d.download(out), 1 + wanted, rtol=1e-5, atol=1e-5)
