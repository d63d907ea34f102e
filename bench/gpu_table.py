"""The table of tested GPUs, made of the files that `wgrad report-gpu` writes: bench/results/gpu-*.json.

    python bench/gpu_table.py REPORT.json ...    # print the rows of these files, for a look before one is taken in

make_table.py writes the table of all files in bench/results into docs/reference/gpus.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pages import table

HEAD = ("GPU", "driver", "system", "self-test", "memory", "float32", "tensor cores", "× CPU", "fine-tune", "wgrad")
FORMAT = 1


def row(path: Path) -> list[str]:
    """The row of a report. Raises ValueError: of another format."""
    report = json.loads(path.read_text(encoding="utf-8"))
    if report.get("format") != FORMAT:
        raise ValueError(f"{path}: format {report.get('format')}, and this script reads {FORMAT}")
    found: dict[str, Any] = report.get("summary") or {}
    name, driver = (found.get(key) or "unknown" for key in ("name", "driver"))
    backend = f" ({found['backend']})" if found.get("backend") else ""
    return [
        _cell(name),
        _cell(f"{driver}{backend}"),
        _cell(report["system"]["platform"].partition("-")[0] + " " + report["system"]["machine"]),
        _self_test(report),
        _rate(found.get("memory_bytes_per_second"), 1e9, "GB/s"),
        _rate(found.get("float32_per_second"), 1e12, "TFLOP/s"),
        _rate(found.get("tensor_cores_per_second"), 1e12, "TFLOP/s"),
        _rate(found.get("times_cpu"), 1.0, "").strip(),
        _fine_tune(report),
        _cell(f"{report['wgrad']}, {report['date']}"),
    ]


def _self_test(report: dict[str, Any]) -> str:
    test = report.get("self-test", {})
    if "failed" not in test:
        return _cell(str(test.get("state", "not run")))
    counts = (
        f"{test['failed']} of {test['passed'] + test['failed']} failed"
        if test["failed"]
        else f"{test['passed']} passed"
    )
    return counts + (f", {len(test['deaths'])} crashed" if test.get("deaths") else "")


def _fine_tune(report: dict[str, Any]) -> str:
    run = report.get("fine-tune", {})
    if "ok" not in run:
        return _cell(str(run.get("state", "not run")))
    return f"{'as NumPy' if run['ok'] else 'wrong'} ({_cell(str(run['compute']))})"


def _rate(value: float | None, unit: float, name: str) -> str:
    return "–" if value is None else f"{float(f'{value / unit:.3g}'):,g} {name}"


def _cell(text: str) -> str:
    """A report is a stranger's file: nothing in it ends a cell or begins markup."""
    return "".join(letter for letter in text if letter.isprintable() and letter not in "|<>[]`\\*")[:80]


def gpu_table(paths: list[Path]) -> str:
    """Return the table, or a sentence if there are no reports."""
    if not paths:
        return "No report has been taken in yet."
    return "\n".join(table(HEAD, sorted(map(row, paths))))


if __name__ == "__main__":
    print(gpu_table([Path(name) for name in sys.argv[1:]]))
