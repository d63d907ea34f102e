"""`wgrad selftest`: the table of every operator's error and limit on a device."""

from __future__ import annotations

import json
import math
import time

import wgrad
from wgrad.autograd.dispatch import select_device
from wgrad.autograd.errors import WgradError
from wgrad.autograd.selftest import Result, run_selftest

_ROW = "{:<46} {:<9} {:<17} {:<20} {:>8} {:>8}  {}"


def _row(result: Result) -> str:
    verdict = "ok" if result.ok else "FAILED" + (f" ({result.message})" if result.message else f" ({result.output})")
    error, limit = f"{result.error:.1e}", f"{result.limit:.1e}"
    name = result.name.removesuffix(f"/{result.dtype}").removesuffix(f"/{result.shape}")  # columns of their own
    return _ROW.format(name, result.direction, result.dtype, result.shape, error, limit, verdict)


def _as_dict(result: Result) -> dict[str, str | float | bool | None]:
    """JSON has no infinity: the error of an operator that raised is null, with the message beside it."""
    return {k: (None if isinstance(v, float) and not math.isfinite(v) else v) for k, v in vars(result).items()}


def print_selftest(spec: str, *, only: str = "", as_json: bool = False) -> int:
    """Run the selftest on the device named by `spec` and print it. -> 0, or 1 where any case failed.

    only: part of the names of the cases to run. WgradError where no case is called so.
    """
    device = select_device(spec)
    reason = getattr(device, "reason", "")
    begun = time.perf_counter()
    if not as_json:
        print(f"device: {device.name}: {device.description} ({reason})")
        print(_ROW.format("operator", "direction", "dtype", "shape", "error", "limit", "verdict"), flush=True)
    results = run_selftest(device, only=only, progress=None if as_json else lambda r: print(_row(r), flush=True))
    if not results:
        raise WgradError(f"--only: no case has {only!r} in its name: leave the option out to see them all")
    failed = [r for r in results if not r.ok]
    seconds = time.perf_counter() - begun
    if as_json:
        report = {
            "wgrad": wgrad.__version__,
            "device": {"name": device.name, "description": device.description, "reason": reason},
            "passed": len(results) - len(failed),
            "failed": len(failed),
            "seconds": round(seconds, 3),
            "results": [_as_dict(r) for r in results],
        }
        print(json.dumps(report, indent=1, allow_nan=False))
    elif failed:
        names = ", ".join(r.name for r in failed[:5]) + (", ..." if len(failed) > 5 else "")
        print(f"{len(failed)} of {len(results)} FAILED in {seconds:.1f} s: {names}: do not train on this device")
    else:
        print(f"all {len(results)} passed in {seconds:.1f} s: errors are within the limits on this device")
    return 1 if failed else 0
