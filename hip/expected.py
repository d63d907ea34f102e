"""Expected times of operators on GPUs that have not been measured yet, to check the first reports against.

The time is the larger of the arithmetic at a share of the peak rate and the arrays at the memory's peak rate. The
share comes from a model of the kernel's machine code (bench/notes/hip.md), so the times are lower bounds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from wgrad.device.roof import Expectation
from wgrad.hip.runtime.architectures import TWINS
from wgrad.hip.runtime.objects import HIP

SHARES = "shares.json"  # in hip/objects, by bench/make_table.py: {architecture: {kernel: share of the peak}}
# Sources that use 16-bit matrix instructions; the others compute in float32.
_MATRIX = ("gemm", "linear", "attention_forward", "attention_backward_dq", "attention_backward_dkv")
# Attention's backward counts 5 matmuls but computes 7: both of its kernels compute scores and dP.
_MADE = {"attention_backward_dq": 5 / 7, "attention_backward_dkv": 5 / 7}


@dataclass(frozen=True)
class _Peaks:
    """FLOP per compute unit and clock, of 16-bit matrix instructions and in float32; transfers per memory clock."""

    matrix: int
    float32: int
    transfers: int


_RDNA3, _APU = _Peaks(512, 256, 16), _Peaks(512, 256, 8)
# Source: AMD's CDNA 2, 3 and 4 white papers and product pages. Memory: HBM2e, HBM3, GDDR6, LPDDR5.
_PEAKS = {
    "gfx90a": _Peaks(1024, 256, 2),
    "gfx942": _Peaks(2048, 256, 4),
    "gfx950": _Peaks(4096, 256, 4),
    **dict.fromkeys(("gfx1100", "gfx1101", "gfx1102"), _RDNA3),
    **dict.fromkeys(("gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153"), _APU),
    **dict.fromkeys(("gfx1200", "gfx1201"), _Peaks(1024, 256, 16)),
}


def expect(
    facts: Mapping[str, Any], kernels: Iterable[tuple[str, str]], flop: float, nbytes: float
) -> Expectation | None:
    """Return the least time of an operator, None where the clocks are not known.

    Args:
        facts: The GPU, as `Gpu.facts` has it.
        kernels: Source and name of each that the operator launches.
        flop: Its arithmetic.
        nbytes: Bytes that it reads and writes.
    """
    architecture, clock_hz = facts["architecture"], 1e6 * facts["clock_mhz"]
    peaks = _PEAKS.get(architecture)
    if peaks is None or not clock_hz:
        return None
    known = _shares().get(TWINS.get(architecture, architecture), {})
    found = [(known[name] * _MADE.get(source, 1.0), source) for source, name in kernels if name in known]
    share, source = min(found, default=(1.0, ""))
    per_clock = peaks.matrix if source in _MATRIX else peaks.float32
    arithmetic = flop / (share * per_clock * facts["compute_units"] * clock_hz)
    rate = 1e6 * facts["memory_clock_mhz"] * peaks.transfers * facts["memory_bus_bits"] / 8
    memory = nbytes / rate if rate else 0.0
    return Expectation(max(arithmetic, memory), "arithmetic" if arithmetic >= memory else "memory", share)


@cache
def _shares() -> dict[str, dict[str, float]]:
    path = HIP / "objects" / SHARES
    found: dict[str, dict[str, float]] = json.loads(path.read_text(encoding="utf-8"))
    return found
