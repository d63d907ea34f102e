"""What scripts that inspect compiled kernels share: the tools, and a table with a row for each architecture and kernel.

A row names the code object that it was made from (`object`: the first 16 digits of its SHA-256, as in
hip/objects/manifest.json), so that a test can tell rows of another object.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from wgrad.hip.build import compile_source
from wgrad.hip.objects import ROOM, serves

ARCHITECTURES = ("gfx90a", "gfx942", "gfx1100", "gfx1201")
EXECUTED = ARCHITECTURES[:3]  # run_hsaco.py does not execute the matrix instructions of gfx1201
# (run_hsaco, isa_report, code object, architecture, isa_report's kernel) -> a row without its `object`
MakeRow = Callable[[Any, Any, Path, str, dict[str, Any]], dict[str, Any]]


def tools() -> tuple[Any, Any] | None:
    """The modules run_hsaco and isa_report; None, with a line on stderr, where the environment does not name them."""
    named = os.environ.get("WGRAD_RUN_HSACO")
    if not named or "TINYGRAD_DIR" not in os.environ:
        print("skipped: $WGRAD_RUN_HSACO names run_hsaco.py and $TINYGRAD_DIR a checkout of tinygrad", file=sys.stderr)
        return None
    sys.path.insert(0, str(Path(named).parent))
    tool, report = importlib.import_module("run_hsaco"), importlib.import_module("isa_report")
    report.mca = lambda *_: "not asked for"  # its estimate is of one wave, and takes minutes for some loops
    return tool, report


def main(description: str | None, out: Path, sources: Sequence[str], make_row: MakeRow) -> None:
    """Reads the command line, makes the rows asked for, and writes the table with the others as they were."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", action="append", choices=ARCHITECTURES)
    parser.add_argument("--only", default="", help="part of a kernel's name; other rows stay as they are")
    parser.add_argument("--source", action="append", choices=sources, help="default: all; other rows stay as they are")
    parser.add_argument("--out", type=Path, default=out)
    arguments = parser.parse_args()
    found = tools()
    if found is None:
        return
    tool, report = found
    architectures = arguments.arch or list(ARCHITECTURES)
    table: Path = arguments.out
    kept = [json.loads(line) for line in table.read_text().splitlines()] if table.exists() else []
    stale = [] if arguments.only or arguments.source else architectures
    rows = {(r["arch"], r["kernel"]): r for r in kept if r["arch"] not in stale}
    with tempfile.TemporaryDirectory() as scratch:
        for arch in architectures:
            for source in arguments.source or sources:
                if not serves(ROOM / f"{source}.hip", arch):
                    continue
                path = Path(scratch) / arch / f"{source}.co"
                compile_source(ROOM / f"{source}.hip", arch, path)
                digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
                for kernel in report.report(str(path), arguments.only or None, 20)["kernels"]:
                    made = make_row(tool, report, path, arch, kernel)
                    rows[arch, kernel["name"]] = made | {"source": source, "object": digest}
                    print(json.dumps(made), flush=True)
    table.parent.mkdir(exist_ok=True)
    table.write_text("".join(json.dumps(rows[key]) + "\n" for key in sorted(rows)))
