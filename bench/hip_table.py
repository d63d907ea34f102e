"""What scripts that inspect compiled kernels share: the tools, and a table with a row for each architecture and kernel.

A row names the code object that it was made from (`object`: the first 16 digits of its SHA-256, as in
hip/objects/manifest.json), so that a test can tell rows of another object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hip_executor import ARCHITECTURES, HIGH_HALF, NEEDS, available, tool

from wgrad.hip.runtime.architectures import SHIPPED
from wgrad.hip.runtime.build import compile_source
from wgrad.hip.runtime.objects import KERNELS, serves

EXECUTED = ARCHITECTURES  # by run_hsaco.py: not gfx1201, whose matrix instructions it lacks
NOT_EXECUTED = "float16 conversions above v127: the executor reads them as on RDNA3"
# (run_hsaco, isa_report, code object, architecture, isa_report's kernel) -> a row without its `object`
MakeRow = Callable[[Any, Any, Path, str, dict[str, Any]], dict[str, Any]]


def inspector() -> Any:
    """The module isa_report, without its slow half."""
    report = tool("isa_report")
    report.mca = lambda *_: "not asked for"  # its estimate is of one wave, and takes minutes for some loops
    return report


def object_digest(path: Path) -> str:
    """The first 16 digits of a code object's SHA-256, which hip/objects/manifest.json has whole."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def encode(x: np.ndarray, kind: str, executor: Any) -> tuple[np.ndarray, np.ndarray]:
    """x as a kernel reads it (kind: f32, f16 or bf16), and the values of that in float64."""
    if kind == "bf16":
        bits = executor.bf16(x)
        return bits, executor.unbf16(bits).astype(np.float64)
    stored = x.astype(np.float16 if kind == "f16" else np.float32)
    return stored, stored.astype(np.float64)


def registers(arch: str, kernel: dict[str, Any]) -> dict[str, Any]:
    """What every row says of a kernel of isa_report."""
    return {
        "arch": arch,
        "kernel": kernel["name"],
        "vgpr": kernel["vgpr_total"],
        "spills": kernel["vgpr_spills"] + kernel["sgpr_spills"],
        "scratch": kernel["scratch_bytes"],
        "lds": kernel["lds_bytes"],
    }


def beyond_the_executor(report: Any, code: Any, name: str, *, within: tuple[int, int] | None = None) -> bool:
    """Does a kernel of CDNA, or its instructions between two addresses, hold what HIGH_HALF says is read wrongly?"""
    if not code.arch.startswith("gfx9"):
        return False
    listing = report.kernel_listing(code, name)
    return any(HIGH_HALF.match(t) for at, t, _ in listing if within is None or within[0] <= at <= within[1])


def main(description: str | None, out: Path, sources: Sequence[str], make_row: MakeRow) -> None:
    """Reads the command line, makes the rows asked for, and writes the table with the others as they were."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", action="append", choices=SHIPPED)
    parser.add_argument("--only", default="", help="part of a kernel's name; other rows stay as they are")
    parser.add_argument("--source", action="append", choices=sources, help="default: all; other rows stay as they are")
    parser.add_argument("--out", type=Path, default=out)
    arguments = parser.parse_args()
    if not available():
        print(f"skipped: {NEEDS}", file=sys.stderr)
        return
    executor, report = tool(), inspector()
    architectures = arguments.arch or list(SHIPPED)
    table: Path = arguments.out
    kept = [json.loads(line) for line in table.read_text().splitlines()] if table.exists() else []
    stale = [] if arguments.only or arguments.source else architectures
    rows = {(r["arch"], r["kernel"]): r for r in kept if r["arch"] not in stale}
    with tempfile.TemporaryDirectory() as scratch:
        for arch in architectures:
            for source in arguments.source or sources:
                if not serves(KERNELS / f"{source}.hip", arch):
                    continue
                path = Path(scratch) / arch / f"{source}.co"
                compile_source(KERNELS / f"{source}.hip", arch, path)
                digest = object_digest(path)
                for kernel in report.report(str(path), arguments.only or None, 20)["kernels"]:
                    made = make_row(executor, report, path, arch, kernel)
                    rows[arch, kernel["name"]] = made | {"source": source, "object": digest}
                    print(json.dumps(made), flush=True)
    table.parent.mkdir(exist_ok=True)
    table.write_text("".join(json.dumps(rows[key]) + "\n" for key in sorted(rows)))
