"""`wgrad selftest`: the error and limit of every operator on a device, as a table or as JSON."""

from __future__ import annotations

import json
import math
import platform
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

import wgrad
from wgrad.autograd.select_device import select_device
from wgrad.autograd.selftest.run import Result, prepare_selftest, run_selftest, selftest_cases
from wgrad.device.contract import Device
from wgrad.device.errors import WgradError
from wgrad.train.terminal.output import make_console
from wgrad.train.terminal.progress import Display

_ROW = "{:<46} {:<9} {:<17} {:<20} {:>8} {:>8}  {}"


def _row(result: Result) -> str:
    verdict = "ok" if result.ok else f"FAILED ({result.message or result.output})"
    if result.lacks:
        verdict = f"not run: no operator {result.lacks}"
    error, limit = f"{result.error:.1e}", f"{result.limit:.1e}"
    name = result.name.removesuffix(f"/{result.dtype}").removesuffix(f"/{result.shape}")  # they have own columns
    return _ROW.format(name, result.direction, result.dtype, result.shape, error, limit, verdict)


def _as_dict(result: Result) -> dict[str, str | float | bool | None]:
    """Return a result for JSON, which has no infinity: the error of an operator that raised becomes null."""
    return {k: (None if isinstance(v, float) and not math.isfinite(v) else v) for k, v in vars(result).items()}


def package_versions() -> dict[str, str]:
    """Return the version of each installed package that wgrad requires or can use, by name."""
    versions = {}
    try:
        requirements = metadata.requires("wgrad") or []
    except metadata.PackageNotFoundError:  # run from a checkout
        requirements = ["wgpu", "numpy"]
    for requirement in requirements:
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        extra = re.search(r"extra\s*==\s*['\"](\w+)", requirement)
        if extra is None or extra[1] in ("hip", "hub"):
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
    return versions


def make_report(device: Device, results: list[Result], seconds: float) -> dict[str, Any]:
    """Return the JSON object: GPU, driver, versions, and the error of each case."""
    failed, lacking = sum(not r.ok for r in results), sum(bool(r.lacks) for r in results)
    about = {"name": device.name, "description": device.description, "reason": device.reason}
    return {
        "wgrad": wgrad.__version__,
        "device": {**about, "facts": device.facts},
        "system": {"platform": platform.platform(), "python": platform.python_version()},
        "packages": package_versions(),
        "lacks": sorted(device.lacks),
        "passed": len(results) - failed - lacking,
        "failed": failed,
        "seconds": round(seconds, 3),
        "results": [_as_dict(r) for r in results],
    }


def _run(device: Device, only: str, *, table: bool) -> list[Result]:
    """Run all cases with `only` in their names, and print a line for each if `table` is true."""
    # The progress bar moves to standard error if the table goes to a file or pipe, and with JSON.
    interactive = table and sys.stdout.isatty()
    display = Display(make_console("stdout" if interactive else "stderr"))
    tell: Callable[[str], None] = display.say if interactive else partial(print, flush=True)
    selected, results = selftest_cases(device, only), list[Result]()
    if table:
        tell(f"device: {device.name}: {device.description} ({device.reason})")
        tell(_ROW.format("operator", "direction", "dtype", "shape", "error", "limit", "verdict"))
    if not selected:
        raise WgradError(f"--only: no case has {only!r} in its name: leave the option out to see them all")
    with display.phase("compiling", unit="shaders") as phase:
        prepare_selftest(device, selected, phase.update)
    with display.phase("self-test", len(selected), "cases") as phase:

        def take(result: Result) -> None:
            results.append(result)
            if table:
                tell(_row(result))
            phase.update(len(results))

        run_selftest(device, selected=selected, progress=take)
    return results


def print_selftest(spec: str, *, only: str = "", as_json: bool = False) -> int:
    """Run the self-test and print its results.

    Args:
        spec: Device, as for --device.
        only: Part of the names of the cases to run.
        as_json: Whether to print one JSON object instead of the table.

    Returns:
        0, or 1 if a case failed.

    Raises:
        WgradError: No case has such a name.
    """
    device = select_device(spec, kernels=True)
    begun = time.perf_counter()
    results = _run(device, only, table=not as_json)
    seconds = time.perf_counter() - begun
    failed = [r for r in results if not r.ok]
    if as_json:
        print(json.dumps(make_report(device, results, seconds), indent=1, allow_nan=False))
        return 1 if failed else 0
    if device.lacks:
        print(f"not on this device: {', '.join(sorted(device.lacks))}")
    if failed:
        names = ", ".join(r.name for r in failed[:5]) + (", ..." if len(failed) > 5 else "")
        print(f"{len(failed)} of {len(results)} FAILED in {seconds:.1f} s: {names}: do not train on this device")
        return 1
    passed = sum(not r.lacks for r in results)
    print(f"all {passed} passed in {seconds:.1f} s: errors are within the limits on this device")
    return 0
