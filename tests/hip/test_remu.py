"""A few cases of the self-test on the second executor of gfx1100's objects: tests/hip/executor/remu.py."""

from __future__ import annotations

import pytest

from tests.hip.executor.remu import REVERSED, RIGHT, check, library

# One of each family, most with sizes that divide nothing.
CASES = (
    "swiglu_backward/7x123/float32",
    "rope/forward/37x3x64/float32",
    "rope_append/partial/2x3x3x32/float32",
    "q4_k_dequantize/plain/160x256/float16",
    "cast from bfloat16/7x123/float32",
    "dropout/7x123/float32",
    "embedding/float32 table/71x37,123/float32",
    "adamw/applied/1003",
    "kv_append/past the end/float16",
    "log_odds_backward/7x123/float32",
    "gemm_nn/plain/41x123x67/float32",
    "gemm_nt/row/1x123x67/float32",
    "attention/width/1x37x2x1x64/float16",
    "ssd/packed/2x133x1x2x10x6/float16",
)


@pytest.mark.parametrize("order", [[], [REVERSED]], ids=["in order", "reversed"])
def test_cases_are_right_on_remu(order: list[str]) -> None:
    if not library():
        pytest.skip("$WGRAD_REMU names no libremu.so: tests/hip/executor/remu.py says how to build it")
    assert check(CASES, *order) == dict.fromkeys(CASES, RIGHT)
