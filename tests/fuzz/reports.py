"""Reports of `wgrad report-gpu` as the script reads that makes a table of them, the lines of a report's parts, and the
ids of a run in other tools: `report table`, `report lines`, `report tracker`."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from tests.fuzz.base import dump
from tests.fuzz.case import Case, Content, Files, Special
from tests.fuzz.values import mutate_json, mutate_value, write_json
from wgrad.device.errors import WgradError

REPORT = "report"
_ROOFS = [{"name": "memory", "per_second": 1e11}, {"name": "float32", "per_second": 1e12}]
_PARTS: dict[str, Any] = {
    "device": {"state": "done", "facts": {"name": "a GPU", "backend": "Vulkan"}, "fastest_compute": "float16"},
    "self-test": {"state": "done", "passed": 9, "failed": 1, "deaths": [{"at": "silu", "ending": "crashed"}]},
    "rates": {"state": "done", "roofs": _ROOFS, "rows": [{"name": "silu", "seconds": 1e-5}], "left": 0},
    "fine-tune": {"state": "done", "ok": True, "worst": 1e-5, "limit": 1e-3, "compute": "float16"},
    "cpu": {"state": "done", "roofs": _ROOFS},
}  # fmt: skip
_SUMMARY = {
    "name": "a GPU", "backend": "Vulkan", "driver": "1.2", "compute": "float16", "passed": 9, "failed": 1,
    "times_cpu": 3.5, "memory_bytes_per_second": 1e11, "float32_per_second": 1e12, "fine_tune_ok": True,
    "tensor_cores_per_second": None, "fine_tune_worst": 1e-5, "right": False,
}  # fmt: skip
_WHOLE: dict[str, Any] = {
    "format": 1, "wgrad": "0.1", "date": "2026-11-01", "asked": "auto", "packages": {"numpy": "2"},
    "system": {"platform": "Linux-6.1-x86_64", "machine": "x86_64"}, **_PARTS, "summary": _SUMMARY,
}  # fmt: skip
_LINES: list[Any] = [
    {"set": {"state": "running", "doing": "silu", "number": 3}}, {"add": ["cases", {"name": "silu", "failed": True}]},
    {"set": {"passed": 1, "said": "\0row 0\0"}}, {"add": ["roofs", _ROOFS[0]]}, {"set": None},
]  # fmt: skip


def report_case(rng: Random, groups: Any) -> Case:
    """A report, lines of its parts, or the ids of a run."""
    kind = rng.choice(("table", "table", "lines", "tracker"))
    content: Content
    if kind == "table":
        content = mutate_json(rng, dump(_WHOLE))
        if rng.random() < 0.06:
            content = rng.choice((Special("absent"), Special("folder"), Special("sparse", 1 << 33), b"[" * 200_000))
        return Case([REPORT, kind], [], {"report.json": content})
    if kind == "lines":
        lines = [write_json(rng, mutate_value(rng, rng.choice(_LINES))) for _ in range(rng.choice((1, 2, 5)))]
        return Case([REPORT, kind], [], {"lines.txt": b"\n".join(lines)})
    files: Files = {"out/reports.json": mutate_json(rng, dump({"tensorboard": "a", "wandb": "b"}))}
    return Case([REPORT, kind], [], files)


def read_report(name: str) -> int:
    return _READERS[name]()


@cache
def _table() -> Any:
    """The script, which is no part of a package."""
    with patch.object(sys, "path", [str(Path(__file__).parents[2] / "bench"), *sys.path]):
        return importlib.import_module("gpu_table")


def _read_table() -> int:
    try:
        rows = _table().gpu_table([Path("report.json")]).splitlines()
    except WgradError as error:
        print(f"wgrad: error: {error}", file=sys.stderr)
        return 2
    assert len(rows) == 3 and rows[2].count("|") == rows[0].count("|"), rows
    assert len(rows[2]) < 1500 and rows[2].isprintable(), rows[2][:300]
    return 0


def _read_lines() -> int:
    from wgrad.train.commands import report_gpu

    part: dict[str, Any] = {}
    with open("lines.txt", encoding="utf-8", errors="replace") as file:
        for line in file:
            report_gpu.take(part, line)
    assert json.loads(report_gpu._text({"part": part})) == {"part": part}
    return 0


class _Tool:
    """In place of a tool that takes any id."""

    def __init__(self, run: Any) -> None:
        assert run.id is None or isinstance(run.id, str)
        self.id = run.id or "new"

    def log(self, step: int, values: Any) -> None: ...

    def close(self, ok: bool) -> None: ...


def _read_tracker() -> int:
    from wgrad.train.output import reports

    kinds = {name: ("json", "json", _Tool) for name in ("tensorboard", "wandb")}
    try:
        with patch.object(reports, "KINDS", kinds):
            reports.Reports(list(kinds), "out", {}, 1, lambda line: None).close(ok=True)
    except WgradError as error:
        print(f"wgrad: error: {error}", file=sys.stderr)
        return 2
    assert set(json.loads(Path("out/reports.json").read_bytes())) >= set(kinds)
    return 0


_READERS: dict[str, Callable[[], int]] = {"table": _read_table, "lines": _read_lines, "tracker": _read_tracker}
