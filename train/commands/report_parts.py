"""The parts of `wgrad report-gpu`, each in a process of its own: JSON lines on standard output, for report_gpu.py."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

from wgrad.autograd.bench.cost import PRODUCTS
from wgrad.autograd.bench.entries import entries
from wgrad.autograd.bench.entry import SIZES, Entry
from wgrad.autograd.bench.roofline import MEMORY, MeasuredRoof, Row, choose_sizes, measure, measure_machine
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.select_device import select_device
from wgrad.autograd.selftest.case import Case
from wgrad.autograd.selftest.run import Result, call_case, prepare_selftest, run_selftest, selftest_cases
from wgrad.device.contract import Device
from wgrad.device.errors import DeviceError, OperatorMissing, WgradError
from wgrad.train.commands.report_run import compare_runs
from wgrad.train.options.bench_config import AUTO_SIZE

TEST_SECONDS, RATE_SECONDS = 45.0, 30.0
CHUNK = 32  # cases whose kernels are compiled together
WARM_SECONDS, LONG_WARM_SECONDS = 0.1, 0.5  # before an operator; before a peak rate, and each of operators asked for
Said = dict[str, Any]  # a line: {"set": {...}} or {"add": [name, row]}


def describe_device(device: Any) -> Iterator[Said]:
    """Yield a description of the device, with its switches."""
    about = {"name": device.name, "description": device.description, "reason": device.reason, "facts": device.facts}
    switches = ("float16", "bfloat16", "subgroups", "matrix_units", "lanes", "tensor_cores_off", "shared_memory")
    known = {name: getattr(device, name) for name in switches if hasattr(device, name)}
    lacks = {"lacks": sorted(device.lacks), "fastest_compute": device.fastest_compute}
    yield {"set": {**about, "switches": known, **lacks, "identity": list(device.identity)}}
    yield {"set": {"details": device.details(), "said_in_short": device.description}}


def in_order(cases: Iterable[Case]) -> list[Case]:
    """Order cases so that one of each operator, direction and dtype comes first, in case the test ends early."""
    first, others, seen = list[Case](), list[Case](), set[tuple[str, str, str]]()
    for case in cases:
        kind = (case.op, case.direction, case.dtype)
        (others if kind in seen else first).append(case)
        seen.add(kind)
    return first + others


def self_test(device: Device, start: int = 0, most: int = 0, seconds: float = TEST_SECONDS) -> Iterator[Said]:
    """Run cases of the self-test, and yield their results.

    Args:
        device: Device to test.
        start: Number of the first case.
        most: Most cases to run; 0: all.
        seconds: Time after which to stop.
    """
    cases = in_order(selftest_cases(device))
    cases = cases[: start + most] if most else cases
    begun, failed = time.monotonic(), False
    worst: dict[str, float] = {}  # largest error / limit
    for at in range(start, len(cases), CHUNK):
        chunk = cases[at : at + CHUNK]
        if time.monotonic() - begun > seconds:
            yield {"set": {"left": len(cases) - at}}
            break
        yield {"set": {"doing": f"compiling for {chunk[0].name} and {len(chunk) - 1} more", "number": at + CHUNK - 1}}
        prepare_selftest(device, chunk)
        for number, case in enumerate(chunk, at):
            yield {"set": {"doing": case.name, "number": number}}
            (result,) = run_selftest(device, selected=[case])
            if not result.ok and not result.lacks and not failed:
                failed = True
                yield {"set": {"first_failed": number}}
            yield {"add": ["cases", _case_row(result)]}
            for kernel in [] if result.lacks else _kernels(device, partial(call_case, case)):
                worst[kernel] = max(worst.get(kernel, 0.0), result.error / (result.limit or 1.0))
        yield {"set": {"worst_by_kernel": {name: _digits(value) for name, value in sorted(worst.items())}}}
    yield {"set": {"details": device.details()}}


def _kernels(device: Device, work: Callable[[Any], object]) -> list[str]:
    """Return the names of the kernels that `work` launches, if the device knows them."""
    try:
        return [name for _, name in device.kernels_of(work)]
    except (DeviceError, WgradError):  # the case itself has reported it
        return []


def _case_row(result: Result) -> Said:
    row: Said = {"name": result.name, "error": _digits(result.error), "limit": _digits(result.limit)}
    if result.lacks:
        return {**row, "lacks": result.lacks}
    return row if result.ok else {**row, "failed": result.message or f"{result.output} is off"}


def _digits(value: float, count: int = 3) -> float:
    """Round to so many significant digits."""
    return float(f"{value:.{count}g}")


def rates(
    device: Device, size: str = AUTO_SIZE, ops: tuple[str, ...] = (), seconds: float = RATE_SECONDS
) -> Iterator[Said]:
    """Yield the device's peak rates, and the fraction of them that its operators reach.

    Args:
        device: Device to measure.
        size: Size of the work.
        ops: Operators to time, without a limit. None: each once, matmuls and attention first, until the time is over.
        seconds: That time.
    """
    sizes = SIZES[choose_sizes(device) if size == AUTO_SIZE else size]
    yield {"set": {"size": sizes.name, "doing": "peak rates"}}
    machine = measure_machine(device, sizes, LONG_WARM_SECONDS)
    yield {"set": {"launch_seconds": machine.launch_seconds}}
    for roof in machine.roofs.values():
        yield {"add": ["roofs", dataclasses.asdict(roof)]}
    yield {"set": {"details": device.details()}}  # clocks, while it is warm
    shown = [_rate(roof) for roof in machine.roofs.values()]
    yield {"set": {"said_in_short": ", ".join(shown)}}
    begun = time.monotonic()
    selected = by_turns(entries(device, sizes, ops), device.fastest_compute)
    warm_up = LONG_WARM_SECONDS if ops else WARM_SECONDS
    with Sampled(device.sensors) as sampled:
        for number, entry in enumerate(selected):
            if not ops and time.monotonic() - begun > seconds:
                yield {"set": {"left": len(selected) - number}}
                break
            yield {"set": {"doing": entry.name}}
            try:
                row = measure(device, machine, entry, warm_up)
            except OperatorMissing:
                continue
            figures = {"seconds": row.seconds, "spread": row.spread, "flop": row.flop, "bytes": row.nbytes}
            rounded = {name: _digits(value) for name, value in figures.items()} | {"share": _digits(row.share, 4)}
            more = _expected(device, entry, row)
            yield {"add": ["rows", {"name": row.name, **rounded, "bound": row.bound, "roof": row.roof, **more}]}
    if summary := sampled.summary():
        yield {"set": {"sensors": summary}}


def _expected(device: Device, entry: Entry, row: Row) -> Said:
    """Return the kernels of a row, their predicted time, and its ratio to the measured time."""
    with suppress(DeviceError, WgradError):
        kernels = device.kernels_of(lambda dry: getattr(dry, entry.op)(**entry.build(dry)))
        expected = device.expect(kernels, row.flop, row.nbytes)
        if expected is not None:
            names, ratio = [name for _, name in kernels], expected.seconds / row.seconds
            figures = {"expected_seconds": _digits(expected.seconds), "expected_ratio": _digits(ratio)}
            return {"kernels": names, **figures, "expected_bound": expected.bound, "expected_share": expected.share}
    return {}


class Sampled:
    """Context manager that reads sensors in the background. read: returns values by name. pause: seconds."""

    def __init__(self, read: Callable[[], Mapping[str, float]], pause: float = 0.25) -> None:
        self._read, self._pause, self._over = read, pause, threading.Event()
        self._values: dict[str, list[float]] = {}

    def __enter__(self) -> Sampled:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            for name, value in self._read().items():
                self._values.setdefault(name, []).append(value)
            if not self._values or self._over.wait(self._pause):
                return

    def summary(self) -> dict[str, list[float]]:
        """Return the minimum, median and maximum of each sensor."""
        return {name: [min(v), statistics.median(v), max(v)] for name, v in self._values.items()}


def _rate(roof: MeasuredRoof) -> str:
    if roof.name == MEMORY:
        return f"memory {_digits(roof.per_second / 1e9):,g} GB/s"
    return f"{roof.name} {_digits(roof.per_second / 1e12):,g} TFLOP/s"


def by_turns(listed: Iterable[Entry], fastest: str = "float32") -> list[Entry]:
    """Order entries by turns: the largest work of each operator, matmuls first, then the second largest, and so on.

    Work in the device's fastest dtype counts as larger.
    """
    turns: dict[str, int] = {}
    keys: dict[str, tuple[int, bool]] = {}
    for entry in sorted(listed, key=lambda entry: (entry.dtype == fastest, _size(entry)), reverse=True):
        turn = turns[entry.op] = turns.get(entry.op, -1) + 1
        keys[entry.name] = (turn, entry.op not in PRODUCTS)
    return sorted(listed, key=lambda entry: keys[entry.name])


def _size(entry: Entry) -> int:
    return math.prod(int(side) for side in entry.shape.split("x") if side.isdigit())


def cpu_rates(size: str = "small") -> Iterator[Said]:
    """Yield the peak rates of NumPy on this machine's CPU, for comparison with the GPU's."""
    machine = measure_machine(ReferenceDevice(), SIZES[size], WARM_SECONDS)
    for roof in machine.roofs.values():
        yield {"add": ["roofs", dataclasses.asdict(roof)]}


def finite(value: Any) -> Any:
    """Replace numbers that JSON cannot express by None."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main(name: str, spec: str, size: str, start: str = "0", most: str = "0", *ops: str) -> None:
    """Run a part, and write its lines to standard output. start, most: of `self_test`. ops: of `rates`."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # so that drivers print to standard error

    try:
        if name == "cpu":
            lines = cpu_rates("tiny" if size == "tiny" else "small")
        elif name == "fine-tune":
            lines = compare_runs(spec)
        else:
            device = select_device(spec, kernels=True)
            if name == "device":
                lines = describe_device(device)
            elif name == "self-test":
                lines = self_test(device, int(start), int(most))
            else:
                lines = rates(device, size, ops)
        for line in lines:
            print(json.dumps(finite(line), allow_nan=False), file=out, flush=True)
        out.close()
    except (DeviceError, WgradError) as error:
        print(str(error), file=sys.stderr, flush=True)
        os._exit(3)
    os._exit(0)  # skip the driver's own clean-up, which may crash
