"""Check the operators of a run on a GPU that has not run them yet, before the run: `verify`.

A dry run says which kernels the run launches. Those that this GPU, with this driver and these kernels, has not passed
are checked by the smallest cases of the self-test that launch them, or else the nearest kernels of the same file. Each
case runs REPEATS times, because some drivers are wrong only now and then. What passed is kept in the user's cache.

Where a case fails, the check is made again without a kind of kernels that the device can do without (`Device.simpler`).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import wgrad
from wgrad.autograd.selftest.case import Case
from wgrad.autograd.selftest.run import Expected, Result, call_case, expected_outputs, judge, selftest_cases, to_host
from wgrad.device.cache import cache_folder, keep, read_kept
from wgrad.device.contract import Device
from wgrad.device.errors import DeviceError, DeviceLost, OutOfMemory, WgradError

REPEATS = 3
SWITCH = "WGRAD_VERIFY"  # "off": no operator is checked before a run
FORMAT = 1  # of the file that keeps what passed
_LARGEST = 1 << 22  # bytes of it
Progress = Callable[[int, int], None]
Launched = tuple[str, str, tuple[Any, ...]]  # file, entry point, constants


class WrongOperator(WgradError):
    """An operator is wrong on the device, and no simpler kernel is right."""


@dataclass(frozen=True)
class Outcome:
    """operators: how many were checked, 0 where all had passed before. off: the kinds of kernels that were wrong, and
    are off from now on; the work is then to be planned and verified again. wrong: what was seen with them. again: how
    they are tried once more."""

    operators: int = 0
    seconds: float = 0.0
    off: tuple[str, ...] = ()
    wrong: str = ""
    again: str = ""


@dataclass
class _Kept:
    """passed: digests of kernels. off: kinds of kernels that were wrong."""

    path: Path
    device: Sequence[str]
    passed: set[str] = field(default_factory=set)
    off: set[str] = field(default_factory=set)

    def save(self) -> None:
        """Add to what lies there, where another process may have written meanwhile."""
        there = _kept(self.device)
        self.passed |= there.passed
        self.off |= there.off
        text = {"format": FORMAT, "device": self.device, "passed": sorted(self.passed), "off": sorted(self.off)}
        with suppress(OSError):  # checked again next time
            keep(self.path, (json.dumps(text) + "\n").encode())


def _kept(identity: Sequence[str]) -> _Kept:
    digest = hashlib.sha256("\0".join((*identity, wgrad.__version__)).encode()).hexdigest()[:16]
    found = _Kept(cache_folder("verified") / f"{digest}.json", list(identity))
    try:
        said = json.loads(read_kept(found.path, _LARGEST))
        if said["format"] == FORMAT:
            found.passed, found.off = set(map(str, said["passed"])), set(map(str, said["off"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass  # not there, or damaged
    return found


def _digest(kernel: Launched) -> str:
    return hashlib.sha256(repr(tuple(kernel)).encode()).hexdigest()[:16]


def turn_off_what_failed(device: Any) -> None:
    """Turn off the kinds of kernels that were wrong on the device before. For whoever has just opened it."""
    if device.simpler:
        for name in _kept(device.identity).off & set(device.simpler):
            device.turn_off(name, "operators were wrong with them")


def verify(device: Any, dry: Any, progress: Progress | None = None) -> Outcome:
    """Check the kernels that the work on `dry`, a dry run of the device, launches and that have not passed before.

    progress: called with (done, in all).

    Raises:
        WrongOperator: one is wrong, also with simpler kernels.
    """
    if dry is None or os.environ.get(SWITCH) == "off":
        return Outcome()
    kept, begun = _kept(device.identity), time.monotonic()
    missing = [kernel for kernel in dry.launched if _digest(kernel) not in kept.passed]
    if not missing:
        return Outcome()
    chosen = choose_cases(device, missing, dry.launched)
    expected = {case.name: expected_outputs(case) for case in chosen}
    wrong = _check(device, chosen, expected, progress)
    if not wrong:
        kept.passed |= set(map(_digest, missing))
        kept.save()
        return Outcome(len({case.op for case in chosen}), time.monotonic() - begun)
    return _without(device, [case for case in chosen if case.name in wrong], expected, wrong, kept)


def choose_cases(device: Any, missing: Collection[Launched], needed: Collection[Launched]) -> list[Case]:
    """Small cases of the self-test for these kernels. needed: all kernels of the run, which are compiled anyway; a
    software driver, which takes seconds to compile one, gets no case that launches others."""
    launches: dict[str, set[Launched]] = {}
    sizes: dict[str, int] = {}
    cases = selftest_cases(device)
    for case in cases:
        dry = device.dry_run()
        with suppress(Exception):  # a shape that this device refuses
            call_case(case, dry)
            launches[case.name], sizes[case.name] = set(dry.launched), dry.memory().peak_bytes
    known = sorted((case for case in cases if case.name in launches), key=lambda case: sizes[case.name])
    needed, left, chosen = set(needed), set(missing), list[Case]()
    for case in known:
        if launches[case.name] & left and launches[case.name] <= needed:
            chosen.append(case)
            left -= launches[case.name]
    if getattr(device, "software", False):
        return chosen
    for kernel in sorted(left, key=repr):
        if kernel not in left:
            continue
        near = [(_alike(kernel, launches[case.name]), -i) for i, case in enumerate(known)]
        likeness, place = max(near, default=(0, 0))
        if likeness:
            chosen.append(known[-place])
            left -= launches[known[-place].name]
    return list({case.name: case for case in chosen}.values())


def _alike(kernel: Launched, launched: set[Launched]) -> int:
    """Likeness of the kernel to the nearest of these: equal constants, 0 where none is of its file."""
    file, entry, constants = kernel
    same = [len(set(constants) & set(c)) + 1 for f, e, c in launched if (f, e) == (file, entry)]
    return max(same, default=0)


def _check(
    device: Any, chosen: Sequence[Case], expected: dict[str, Expected], progress: Progress | None = None
) -> dict[str, str]:
    """-> what is wrong, by the name of the case: of each the first of REPEATS runs that is."""
    dry = device.dry_run()
    for case in chosen:
        with suppress(Exception):  # it is a result of its own when the case runs
            call_case(case, dry)
    device.prepare(dry)
    wrong: dict[str, str] = {}
    for repeat in range(REPEATS):
        for number, case in enumerate(chosen):
            if progress is not None:
                progress(repeat * len(chosen) + number, REPEATS * len(chosen))
            if case.name not in wrong and (said := _wrong(device, case, expected[case.name])):
                wrong[case.name] = f"{said} in run {repeat + 1} of {REPEATS}"
    return wrong


def _wrong(device: Device, case: Case, expected: Expected) -> str:
    try:
        found: Result = judge(case, expected, to_host(case, device, call_case(case, device)))
    except OutOfMemory:
        raise
    except DeviceLost as error:
        raise DeviceLost(f"{case.op} ({case.name}): {error}") from error
    except DeviceError as error:
        return str(error)[:200]
    return "" if found.ok else found.message or f"{found.output} is off by {found.error:.2g}, allowed {found.limit:.2g}"


def _without(
    device: Any, cases: Sequence[Case], expected: dict[str, Expected], wrong: dict[str, str], kept: _Kept
) -> Outcome:
    """The failed cases again without one kind of kernels, or without all."""
    case, kinds = cases[0], tuple(device.simpler)
    said = f"{case.op} is wrong ({case.name}: {wrong[case.name]})"
    for off in [*((kind,) for kind in kinds), kinds] if len(kinds) > 1 else [(kind,) for kind in kinds]:
        with device.trying_without(off):
            right = not _check(device, cases, expected)
        if right:
            kept.off |= {kind for kind in off if device.turn_off(kind, said)}
            kept.save()
            again = f"kept in {kept.path}: delete it" if kept.off else "wgrad matrix-units enable"
            return Outcome(off=off, wrong=said, again=f"{again} to check again")
    others = len(wrong) - 1
    more = f" and {others} more case{'s' * (others > 1)}" if others else ""
    raise WrongOperator(
        f"{device.description}: {said}{more}: do not train on this device. Report it with "
        "wgrad report-gpu; another driver, or --device cpu, may be right"
    )
