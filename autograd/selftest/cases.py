"""All cases of the self-test: those of each operator family and of storage."""

from __future__ import annotations

from wgrad.autograd.selftest import (
    activation,
    attention,
    decoding,
    delta_rule,
    elementwise,
    embedding,
    expert_slots,
    experts,
    fused,
    gemm,
    linear,
    log_odds,
    lora,
    loss,
    norm,
    optimizer,
    paging,
    quantize,
    rope,
    selective_scan,
    softmax,
    ssd,
    storage,
)
from wgrad.autograd.selftest.case import F16, F32, Case

FAMILIES = (
    gemm, linear, lora, quantize, norm, activation, rope, attention, softmax, elementwise, fused, embedding, loss,
    storage, optimizer, decoding, paging, log_odds, delta_rule, ssd,
    selective_scan, experts, expert_slots,
)  # fmt: skip


def cases(float16: bool = True) -> list[Case]:
    """Return all cases. float16: whether the device has float16; else cases with it are left out."""
    found = [
        case for dtype in ((F32, F16) if float16 else (F32,)) for family in FAMILIES for case in family.cases(dtype)
    ]
    names = [case.name for case in found]
    assert len(set(names)) == len(names), "two cases of the self-test have the same name"
    return found
