"""hip_executed: every operator of the HIP device on the compiled machine code, waves forward and reversed.

The cases are those of `wgrad selftest` (float32 and float16) and the same operators in bfloat16, with its limits. A row
is one kernel: how many cases launched it, in which orders, the worst error of those cases in units of its limit,
whether both orders gave the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from tests.hip.executor.device import ExecutedDevice
from tests.hip.executor.table import Object, Row
from tests.hip.executor.waves import Order
from wgrad.autograd.selftest import gemm, linear, quantize
from wgrad.autograd.selftest.attention import attention_case
from wgrad.autograd.selftest.case import BF16, F16, Case, upload_inputs
from wgrad.autograd.selftest.cases import FAMILIES, cases
from wgrad.autograd.selftest.experts import grouped_case
from wgrad.autograd.selftest.run import expected_outputs, largest_difference, to_host
from wgrad.hip.elements import implements

ORDERS: tuple[Order, Order] = ("fwd", "rev")
# They take minutes and launch what smaller ones launch.
SLOW = ("packed/2x133", "packed window/2x133", "grouped/2x70", "tiles/1x259", "/window/2x70", "large vocabulary")


def expert_cases() -> list[Case]:
    """GEMMs of experts by each kernel of gemm_grouped.hip. Some rows, and more than a tile's."""
    found = []
    for dtype in (F16, BF16):
        for format, double in (("", False), ("nf4", False), ("nf4", True), ("q8_0", False), ("mxfp4", False)):
            options: dict[str, Any] = {"format": format, "double": double, "weight": dtype}
            sizes = (140, 3, 1, 40, 72) if dtype == F16 and not format else (9, 3, 2, 40, 72)
            found += [grouped_case(side, "kernel", sizes, dtype, **options) for side in ("forward", "backward")]
    return found


def all_cases() -> list[Case]:
    """The self-test's, and the operators that read bfloat16 too, attention in shares of the keys, and GEMMs of experts
    of each kernel; without SLOW and without operators that HIP lacks."""
    found = {case.name: case for case in cases()}
    for family in FAMILIES:
        if family not in (gemm, linear, quantize):
            found |= {case.name: case for case in family.cases(BF16) if case.name not in found}
    for dtype in (F16, BF16):
        shares = attention_case("shares", (1, 3, 1, 1, 64), dtype, keys=515, cache_len=512)
        found[shares.name] = shares
    found |= {case.name: case for case in expert_cases()}
    has = (case for case in found.values() if case.op not in implements.lacks)
    return [case for case in has if not any(part in case.name for part in SLOW)]


def ratio_to_limit(found: dict[str, np.ndarray], oracle: dict[str, np.ndarray], limits: dict[str, float]) -> float:
    """Largest error of an output in units of its limit; infinity where it must be exact and is not."""
    worst = 0.0
    for name, value in oracle.items():
        error, limit = largest_difference(found[name], value), limits[name]
        worst = max(worst, error / limit if limit > 0 else 0.0 if error == 0 else float("inf"))
    return worst


def execute(device: Any, case: Case) -> tuple[float, bool]:
    """Worst error in units of its limit over both orders, and whether both gave the same bits.

    `device.execution.kernels` names what was launched.

    Raises:
        DeviceError: an access out of bounds, or something that the executor does not know.
    """
    expected = expected_outputs(case)
    device.forget()
    made = []
    for device.order in ORDERS:
        made.append(to_host(case, device, case.call(device, upload_inputs(device, case.inputs()))))
    same = all(made[0][n].tobytes() == made[1][n].tobytes() for n in expected.oracle)
    return max(ratio_to_limit(found, expected.oracle, expected.limits) for found in made), same


@cache
def _executed(architecture: str) -> Any:
    return ExecutedDevice(architecture)


@cache
def sources(architecture: str) -> dict[str, set[str]]:
    """Sources whose kernels each case launches, by its name. Nothing is executed."""
    found = {}
    for case in all_cases():
        dry = _executed(architecture).dry_run()
        case.call(dry, upload_inputs(dry, case.inputs()))
        found[case.name] = {source for source, _ in dry.kernels}
    return found


def rows(made: Object, kernels: list[str], say: Callable[[str], None]) -> list[Row]:
    """A row for each kernel of a code object that some case launches."""
    device = _executed(made.architecture)
    results: dict[str, list[tuple[float, str, bool]]] = {}
    for case in all_cases():
        if made.source not in sources(made.architecture)[case.name]:
            continue
        ratio, same = execute(device, case)
        say(f"{case.name}: {ratio:.3f} of its limit")
        for kernel in set(device.execution.kernels) & set(kernels):
            results.setdefault(kernel, []).append((ratio, case.name, same))
    found = []
    for kernel, of in results.items():
        worst, name, _ = max(reversed(of), key=lambda r: r[0])
        row: Row = {"kernel": kernel, "cases": len(of), "orders": list(ORDERS), "worst": float(f"{worst:.3g}")}
        found.append(row | {"worst_case": name, "same_bits": all(same for *_, same in of)})
    return found
