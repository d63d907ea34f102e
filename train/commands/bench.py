"""`wgrad bench`: the device's peak rates, and how much of them each operator reaches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from wgrad.autograd.bench.entries import entries
from wgrad.autograd.bench.entry import SIZES, Entry
from wgrad.autograd.bench.roofline import MEMORY, Machine, Row, choose_sizes, measure, measure_machine
from wgrad.autograd.select_device import select_device
from wgrad.device.contract import Device
from wgrad.device.errors import OperatorMissing, WgradError
from wgrad.device.files import check_writable, write_text
from wgrad.device.formats.frozen_weight import formats
from wgrad.train.commands.against_cpu import run_against_cpu
from wgrad.train.commands.bench_report import (
    SLOWER,
    Comparison,
    Report,
    check_device,
    check_operators,
    compare,
    read_report,
)
from wgrad.train.commands.roofline_chart import roofline_chart
from wgrad.train.options.bench_config import AUTO_SIZE, BenchConfig
from wgrad.train.terminal.output import make_console
from wgrad.train.terminal.progress import Display

_ROW = "{:<58} {:>10} {:>6} {:>9} {:>8} {:>8}  {:<10} {:>6}  {}"
_HEAD = _ROW.format("operator", "µs", "spread", "GFLOP/s", "GB/s", "FLOP/B", "bound", "share", "look at")


def run_bench(config: BenchConfig) -> int:
    """Run `wgrad bench` and return 0, or 1 if --compare finds a slower operator.

    Raises:
        WgradError: There is no such operator or file.
    """
    _check(config)
    if config.against_cpu:
        return run_against_cpu(config)
    if config.explain:
        return _explain(config.explain, select_device(config.device, kernels=True))
    before = read_report(config.compare) if config.compare else None
    device = select_device(config.device, kernels=True)
    if before is not None and config.compare:
        check_device(before, config.compare, device)
    # The progress bar moves to standard error if the table goes to a file or pipe.
    interactive = sys.stdout.isatty()
    display = Display(make_console("stdout" if interactive else "stderr"))
    tell = display.say if interactive else partial(print, flush=True)
    tell(f"device: {device.description} ({device.reason})")
    sizes = SIZES[_size(config, before, device)]
    machine = measure_machine(device, sizes, config.warm_up)
    for line in _roof_lines(machine, sizes.name):
        tell(line)
    selected = entries(device, sizes, config.op)
    if before is not None:
        selected = _in_report(before, selected, tell)
    rows = _measure_all(config, device, machine, selected, display, tell)
    if config.out:
        write_text(config.out, roofline_chart(machine, rows, device.description), "--out")
    if before is None:
        return 0
    by_name = {entry.name: entry for entry in selected}
    found = compare(before, machine, rows, lambda name: measure(device, machine, by_name[name], config.warm_up))
    for line in _comparison_lines(found):
        tell(line)
    return 1 if found.slower else 0


def _explain(sizes: str, device: Device) -> int:
    """Print the kernel of each GEMM of a linear layer, by the dtype or format of its weight."""
    m, n, k = map(int, sizes.split("x"))
    weights: dict[tuple[str, str], list[str]] = {}
    for backward in (False, True):
        for weight in ("float32", "float16", "bfloat16", *formats()):
            text = device.explain_linear((m, n, k), weight, backward)
            if not text:
                raise WgradError(f"--explain: {device.name} shows no plan: use a wgpu device")
            weights.setdefault(("backward" if backward else "forward", text), []).append(weight)
    print(f"device: {device.description} ({device.reason})")
    print(f"linear layer: {m} tokens, {n} outputs, {k} inputs; activations in {device.fastest_compute}")
    for (direction, text), names in weights.items():
        print(f"{direction}, weight in {', '.join(names)}:\n  {text}")
    return 0


def _size(config: BenchConfig, before: Report | None, device: Device) -> str:
    """Return --size, else that of the file to compare with, else what suits the device."""
    if config.size != AUTO_SIZE:
        return config.size
    if before is None:
        return choose_sizes(device)
    size = before.rates.size
    if size not in SIZES:
        raise WgradError(f"--compare: {config.compare}: rates.size must be one of {', '.join(SIZES)}; got {size!r}")
    return size


def _in_report(before: Report, selected: Sequence[Entry], tell: Callable[[str], None]) -> list[Entry]:
    """Return the entries that the report has too, and tell how many others there are."""
    names = {row.name for row in before.rates.rows}
    found = [entry for entry in selected if entry.name in names]
    if len(found) < len(selected):
        others = f"{len(selected) - len(found)} of {len(selected)} operators are not in the file"
        tell(f"{others}: wgrad report-gpu --only rates times all")
    return found


def _measure_all(
    config: BenchConfig,
    device: Device,
    machine: Machine,
    selected: Sequence[Entry],
    display: Display,
    tell: Callable[[str], None],
) -> list[Row]:
    """Time every entry, and print its line of the table at once."""
    tell(_HEAD)
    rows: list[Row] = []
    if device.lacks:
        tell(f"not on this device: {', '.join(sorted(device.lacks))}")
    with display.phase("measuring", len(selected), "operators") as phase:
        for entry in selected:
            try:
                rows.append(measure(device, machine, entry, config.warm_up))
            except OperatorMissing:
                continue
            tell(_row(rows[-1]))
            phase.update(len(rows))
    return rows


def _check(config: BenchConfig) -> None:
    check_operators(config.op)
    if config.out:
        if Path(config.out).suffix != ".svg":
            raise WgradError(f"--out: must end in .svg, which is what is drawn; got {config.out}")
        check_writable(config.out, "--out")


def _roof_lines(machine: Machine, size: str) -> list[str]:
    found = [f"peak rates ({size} sizes): a launch {machine.launch_seconds * 1e6:.1f} µs"]
    for roof in machine.roofs.values():
        unit = "GB/s" if roof.name == MEMORY else "GFLOP/s"
        found.append(f"  {roof.name}: {roof.per_second / 1e9:,.4g} {unit}, spread {roof.spread:.0%}, by {roof.by}")
    return found


def _row(row: Row) -> str:
    rates = f"{row.flop / row.seconds / 1e9:,.4g}", f"{row.nbytes / row.seconds / 1e9:,.4g}"
    intensity, spread = f"{row.intensity:.3g}", f"{row.spread:.0%}"
    time = f"{row.seconds * 1e6:,.1f}"
    return _ROW.format(row.name, time, spread, *rates, intensity, row.bound, f"{row.share:.0%}", row.look_at)


def _comparison_lines(found: Comparison) -> Sequence[str]:
    lines = [
        f"SLOWER: {c.name}: by {c.slower:.1%}, of which noise explains {c.noise:.1%} at most" for c in found.slower
    ]
    if found.missing:
        lines.append(f"not timed now: {', '.join(found.missing)}")
    if found.unjudged:
        lines.append(f"too noisy to be judged by {SLOWER:.0%}: {len(found.unjudged)} of {len(found.changes)}")
    verdict = f"{len(found.slower)} of {len(found.changes)} operators are" if found.slower else "no operator is"
    return [*lines, f"{verdict} more than {SLOWER:.0%} slower than before, beyond noise"]
