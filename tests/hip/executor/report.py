"""A page about a kernel's machine code, for whoever changes the kernel."""

from __future__ import annotations

from collections import Counter

from tests.hip.executor.code_object import CodeObject
from tests.hip.executor.isa import hot_loop, instructions, invalidations, is_matrix, registers, widths
from tests.hip.executor.occupancy import waves_that_fit
from tests.hip.executor.products import busy

_SHOWN = 16  # of a loop's instructions, the most frequent


def lines(code: CodeObject, kernel: str) -> list[str]:
    """Registers and memory; widths of accesses; the hot loop and how busy it keeps the tensor cores."""
    found, size = instructions(code, kernel), registers(code, kernel)
    lanes = code.lanes(kernel)
    group = code.kernels[kernel][".max_flat_workgroup_size"] // lanes
    waves = waves_that_fit(code.architecture, size["vgpr"], size["lds"], group)
    made = [
        f"{kernel} ({code.architecture}): {size['vgpr']} VGPRs ({waves} waves a SIMD), {size['spills']} spilled,"
        f" {size['scratch']} bytes of scratch, {size['lds']:,} of LDS, {len(found):,} instructions",
        f"  accesses: {_counts(widths(found))}; cache invalidations in loops: {invalidations(found)}",
    ]
    if loop := hot_loop(found):
        matrix = sum(is_matrix(i.text) for i in loop)
        common = Counter(i.name for i in loop).most_common(_SHOWN)
        shares = busy(code.architecture, lanes, [i.text for i in loop], waves)
        made += [
            f"  hot loop: {len(loop)} instructions, {matrix} matrix; accesses: {_counts(widths(loop))}",
            "  its instructions: " + ", ".join(f"{name} {n}" for name, n in common),
            "  model, 600 clocks of latency: the tensor cores are busy "
            + ", ".join(f"{share:.1%} with {n} waves" for n, share in shares.items()),
        ]
    return made


def _counts(found: dict[str, dict[str, int]]) -> str:
    parts = (f"{kind} " + ", ".join(f"{width} x{n}" for width, n in of.items()) for kind, of in found.items())
    return "; ".join(parts) or "none"
