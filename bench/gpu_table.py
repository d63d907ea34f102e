"""The table of tested GPUs, made of the files that `wgrad report-gpu` writes: bench/results/gpu-*.json.

    python bench/gpu_table.py REPORT.json ...    # print the rows of these files, for a look before one is taken in

make_table.py writes the table of all files in bench/results into docs/reference/gpus.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
from pages import table

from wgrad.device.errors import WgradError
from wgrad.train.files.decode import read_json

HEAD = ("GPU", "driver", "system", "self-test", "memory", "float32", "tensor cores", "× CPU", "fine-tune", "wgrad")
FORMAT = 1


class _Format(msgspec.Struct):
    format: int


class _Summary(msgspec.Struct):
    name: str | None = None
    driver: str | None = None
    backend: str | None = None
    memory_bytes_per_second: float | None = None
    float32_per_second: float | None = None
    tensor_cores_per_second: float | None = None
    times_cpu: float | None = None


class _System(msgspec.Struct):
    platform: str
    machine: str


class _Test(msgspec.Struct):
    state: str = "not run"
    passed: int = 0
    failed: int | None = None
    deaths: list[Any] = []


class _Run(msgspec.Struct):
    state: str = "not run"
    ok: bool | None = None
    compute: str = "unknown"


class _Report(msgspec.Struct, rename={"self_test": "self-test", "fine_tune": "fine-tune"}):
    """The parts of a report that the table shows."""

    wgrad: str
    date: str
    system: _System
    summary: _Summary | None = None
    self_test: _Test = msgspec.field(default_factory=_Test)
    fine_tune: _Run = msgspec.field(default_factory=_Run)


def row(path: Path) -> list[str]:
    """The row of a report. Raises WgradError: it is none, or of another format."""
    found = read_json(path, _Format, "REPORT").format
    if found != FORMAT:
        raise WgradError(f"REPORT: {path}: format {found}, and this script reads {FORMAT}")
    report = read_json(path, _Report, "REPORT", "ask for the file that wgrad report-gpu has written")
    summary = report.summary or _Summary()
    backend = f" ({summary.backend})" if summary.backend else ""
    return [
        _cell(summary.name or "unknown"),
        _cell(f"{summary.driver or 'unknown'}{backend}"),
        _cell(report.system.platform.partition("-")[0] + " " + report.system.machine),
        _self_test(report.self_test),
        _rate(summary.memory_bytes_per_second, 1e9, "GB/s"),
        _rate(summary.float32_per_second, 1e12, "TFLOP/s"),
        _rate(summary.tensor_cores_per_second, 1e12, "TFLOP/s"),
        _rate(summary.times_cpu, 1.0, "").strip(),
        _fine_tune(report.fine_tune),
        _cell(f"{report.wgrad}, {report.date}"),
    ]


def _self_test(test: _Test) -> str:
    if test.failed is None:
        return _cell(test.state)
    counts = f"{test.failed} of {test.passed + test.failed} failed" if test.failed else f"{test.passed} passed"
    return counts + (f", {len(test.deaths)} crashed" if test.deaths else "")


def _fine_tune(run: _Run) -> str:
    if run.ok is None:
        return _cell(run.state)
    return f"{'as NumPy' if run.ok else 'wrong'} ({_cell(run.compute)})"


def _rate(value: float | None, unit: float, name: str) -> str:
    return "–" if value is None else f"{float(f'{value / unit:.3g}'):,g} {name}"


def _cell(text: str) -> str:
    """A report is a stranger's file: nothing in it ends a cell or begins markup."""
    return "".join(letter for letter in text if letter.isprintable() and letter not in "|<>[]`\\*")[:80]


def gpu_table(paths: list[Path]) -> str:
    """Return the table, or a sentence if there are no reports. Raises WgradError: a file is no report."""
    if not paths:
        return "No report has been taken in yet."
    return "\n".join(table(HEAD, sorted(map(row, paths))))


if __name__ == "__main__":
    try:
        print(gpu_table([Path(name) for name in sys.argv[1:]]))
    except WgradError as error:
        sys.exit(f"gpu_table: {error}")
