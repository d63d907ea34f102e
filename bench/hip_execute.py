"""Every operator of the HIP device on the compiled machine code: the self-test's cases, waves forward and reversed.

    WGRAD_RUN_HSACO=.../run_hsaco.py TINYGRAD_DIR=.../tinygrad python bench/hip_execute.py [--arch gfx942] [--only rope]

The cases are those of `wgrad selftest` (float32 and float16) and the same operators in bfloat16, with its limits. A row
of bench/results/hip_executed.jsonl is one kernel of one architecture: how many cases launched it, in which orders, the
worst error of those cases in units of its limit, whether both orders gave the same bits. Some large cases, which take
minutes and launch what smaller ones launch, run with --slow only. A run with --only prints its rows and leaves the file
alone. An executor, not a card: its head says what it does not model.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hip_executor import ARCHITECTURES, NEEDS, ExecutedDevice, Unsupported, available

from wgrad.autograd.selftest import operators as selftest_operators
from wgrad.autograd.selftest import training as selftest_training
from wgrad.autograd.selftest.case import (
    BF16,
    Case,
    cases,
    upload_inputs,
)
from wgrad.autograd.selftest.run import expected_outputs, largest_difference, to_host

OUT = Path(__file__).parent / "results" / "hip_executed.jsonl"
ORDERS = ("fwd", "rev")
# Not all of these kernels serve the self-test's small cases: hip_isa.py and hip_attention.py run every one of them.
ELSEWHERE = ("gemm", "gemv", "linear", "attention_forward", "attention_backward_d")
SLOW = ("packed/2x133", "packed window/2x133", "grouped/2x70", "tiles/1x259", "/window/2x70", "large vocabulary")


@dataclass
class Tally:
    """What is known of one kernel."""

    cases: int = 0
    worst: float = 0.0
    worst_case: str = ""
    same_bits: bool = True
    warnings: set[str] = field(default_factory=set)
    not_executed: str = ""

    def add(self, case: Case, ratio: float, same_bits: bool) -> None:
        self.cases += 1
        self.same_bits &= same_bits
        if ratio >= self.worst:
            self.worst, self.worst_case = ratio, case.name


def all_cases() -> list[Case]:
    """The self-test's, and the operators that read bfloat16 too."""
    found = {case.name: case for case in cases()}
    for case in (*selftest_operators.cases(BF16), *selftest_training.cases(BF16)):
        found.setdefault(case.name, case)
    return list(found.values())


def ratio_to_limit(found: dict[str, np.ndarray], oracle: dict[str, np.ndarray], limits: dict[str, float]) -> float:
    """Largest error of an output in units of its limit; infinity where it must be exact and is not."""
    worst = 0.0
    for name, value in oracle.items():
        error, limit = largest_difference(found[name], value), limits[name]
        worst = max(worst, error / limit if limit > 0 else 0.0 if error == 0 else float("inf"))
    return worst


def execute(device: ExecutedDevice, case: Case) -> tuple[float, bool]:
    """Worst error in units of its limit over both orders, and whether both gave the same bits.

    `device.execution.kernels` names what was launched.

    Raises:
        Unsupported: the executor cannot run a kernel. DeviceError: an access out of bounds, or the like.
    """
    expected = expected_outputs(case)
    device.forget()
    made = []
    for device.order in ORDERS:
        made.append(to_host(case, device, case.call(device, upload_inputs(device, case.inputs()))))
    same = all(made[0][n].tobytes() == made[1][n].tobytes() for n in expected.oracle)
    return max(ratio_to_limit(found, expected.oracle, expected.limits) for found in made), same


def run(device: ExecutedDevice, selected: Iterable[Case]) -> tuple[dict[str, Tally], list[str], int]:
    """A tally by kernel, one line for each case that failed, and how many the executor cannot run."""
    tallies: dict[str, Tally] = {}
    failures = []
    left_out = 0
    for case in selected:
        started = time.perf_counter()
        try:
            ratio, same = execute(device, case)
        except Unsupported as error:
            tallies.setdefault(error.kernel, Tally()).not_executed = str(error)
            left_out += 1
            print(f"{case.name}: not executed: {error}", flush=True)
            continue
        except Exception as error:  # the table is printed whole
            failures.append(f"{case.name}: {type(error).__name__}: {error}")
            print(failures[-1], flush=True)
            continue
        for kernel in set(device.execution.kernels):
            tally = tallies.setdefault(kernel, Tally())
            tally.add(case, ratio, same)
            tally.warnings |= {w for w in device.execution.warnings if w.startswith(f"{kernel}:")}
        if ratio > 1:
            failures.append(f"{case.name}: {ratio:.3g} times its limit")
        print(f"{case.name}: {ratio:.3f} of its limit, {time.perf_counter() - started:.1f} s", flush=True)
    return tallies, failures, left_out


def row(architecture: str, kernel: str, source: str, tally: Tally | None) -> dict[str, Any]:
    made: dict[str, Any] = {"arch": architecture, "kernel": kernel, "source": source}
    if tally is None:
        return {**made, "not_executed": "no case launches it"}
    if tally.not_executed and not tally.cases:
        return {**made, "not_executed": tally.not_executed}
    made |= {"cases": tally.cases, "orders": list(ORDERS), "worst": float(f"{tally.worst:.3g}")}
    made |= {"worst_case": tally.worst_case, "same_bits": tally.same_bits}
    if tally.not_executed:
        made["not_executed"] = tally.not_executed
    if tally.warnings:
        made["warnings"] = sorted(tally.warnings)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", action="append", choices=ARCHITECTURES)
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--slow", action="store_true", help="the large cases too")
    parser.add_argument("--objects", type=Path, help="keep code objects in this folder")
    arguments = parser.parse_args()
    if not available():
        print(f"skipped: {NEEDS}", file=sys.stderr)
        return 0
    selected = [case for case in all_cases() if arguments.only in case.name]
    if not arguments.slow:
        selected = [case for case in selected if not any(part in case.name for part in SLOW)]
    kept = [json.loads(line) for line in OUT.read_text().splitlines()] if OUT.exists() else []
    architectures = arguments.arch or list(ARCHITECTURES)
    rows = [r for r in kept if r["arch"] not in architectures]
    failed, counts = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for architecture in architectures:
            device = ExecutedDevice(architecture, arguments.objects or Path(scratch))
            tallies, failures, left_out = run(device, selected)
            counts.append(
                f"{architecture}: {len(selected) - left_out - len(failures)} within limits, {left_out} not run"
            )
            failed += [f"{architecture} {line}" for line in failures]
            found = [row(architecture, kernel, source, tallies.get(kernel)) for kernel, source in device.kernels()]
            rows += [r for r in found if "worst" in r or not (arguments.only or r["source"].startswith(ELSEWHERE))]
    rows.sort(key=lambda r: (r["arch"], r["source"], r["kernel"]))
    text = "".join(json.dumps(r) + "\n" for r in rows)
    if arguments.only:
        print(text)
    else:
        OUT.write_text(text)
    print("\n".join([*failed, f"of {len(selected)} cases, " + "; ".join(counts)]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
