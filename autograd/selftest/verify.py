"""`verify`: check the kernels of a run on a GPU that has not run them yet, before the run.

A dry run lists the kernels that the run launches. Those that have not passed on this GPU and driver are checked with
the smallest cases of the self-test that launch them, or launch similar kernels of the same file. Each case runs REPEATS
times, because some drivers fail only sometimes. The kernels that pass are kept in the user's cache.

If a case fails, the check is repeated without a kind of kernels that the device can do without (`Device.simpler`).
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
from wgrad.device.shown import counted

REPEATS = 3
SWITCH = "WGRAD_VERIFY"  # environment variable; "off": check no operator
FORMAT = 1  # version of the file with kernels that passed
_LARGEST = 1 << 22  # most bytes of that file
Progress = Callable[[int, int], None]
Launched = tuple[str, str, tuple[Any, ...]]  # file, entry point, constants


class WrongOperator(WgradError):
    """An operator is wrong on the device, and no simpler kernel is right."""


@dataclass(frozen=True)
class Outcome:
    """Result of a check.

    operators: number of operators that were checked; 0: all had passed before. off: kinds of kernels that were wrong
    and are now turned off; the work must then be planned and verified again. wrong: description of their failure.
    again: advice on how to check them again.
    """

    operators: int = 0
    seconds: float = 0.0
    off: tuple[str, ...] = ()
    wrong: str = ""
    again: str = ""


@dataclass
class _Kept:
    """Results kept in the user's cache. passed: digests of kernels. off: kinds of kernels that were wrong."""

    path: Path
    device: Sequence[str]
    passed: set[str] = field(default_factory=set)
    off: set[str] = field(default_factory=set)

    def save(self) -> None:
        """Merge these results into the file, which another process may have written meanwhile."""
        there = _kept(self.device)
        self.passed |= there.passed
        self.off |= there.off
        text = {"format": FORMAT, "device": self.device, "passed": sorted(self.passed), "off": sorted(self.off)}
        with suppress(OSError):  # checked again next time
            keep(self.path, (json.dumps(text) + "\n").encode())


def _file(identity: Sequence[str]) -> Path:
    """Return the file of the cache for a device and this version."""
    digest = hashlib.sha256("\0".join((*identity, wgrad.__version__)).encode()).hexdigest()[:16]
    return cache_folder("verified") / f"{digest}.json"


def _kept(identity: Sequence[str]) -> _Kept:
    found = _Kept(_file(identity), list(identity))
    try:
        said = json.loads(read_kept(found.path, _LARGEST))
        if said["format"] == FORMAT:
            found.passed, found.off = set(map(str, said["passed"])), set(map(str, said["off"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass  # missing or damaged
    return found


def _digest(kernel: Launched) -> str:
    return hashlib.sha256(repr(tuple(kernel)).encode()).hexdigest()[:16]


def turn_off_what_failed(device: Any) -> None:
    """Turn off the kinds of kernels that were wrong on the device before. Call this after opening it."""
    if device.simpler:
        for name in _kept(device.identity).off & set(device.simpler):
            device.turn_off(name, "operators were wrong with them")


def verify(device: Any, dry: Any, progress: Progress | None = None) -> Outcome:
    """Check the kernels that `dry`, a dry run of the device, launches and that have not passed before.

    progress: called with (done, total).

    Raises:
        WrongOperator: An operator is wrong, also with simpler kernels.
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
    """Choose small cases of the self-test that launch the kernels `missing`.

    needed: all kernels of the run, which are compiled anyway. A software driver takes seconds to compile a kernel, so
    it gets no case that launches others.
    """
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
    """Return how similar the most similar kernel is: 1 + the number of constants in common, and more than that if it
    decodes the same format; 0: all have other entry points."""
    file, entry, constants = kernel
    others = [set(c) for f, e, c in launched if (f, e) == (file, entry)]
    decoder = {constant for constant in constants if constant[0] == "B_FORMAT"}
    return max((1 + len(c & set(constants)) + len(constants) * (decoder <= c) for c in others), default=0)


def _check(
    device: Any, chosen: Sequence[Case], expected: dict[str, Expected], progress: Progress | None = None
) -> dict[str, str]:
    """Run each case REPEATS times, and return a description of its first failure by name of the case."""
    dry = device.dry_run()
    for case in chosen:
        with suppress(Exception):  # reported when the case runs
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
    """Repeat the failed cases without one kind of kernels, or without all, and turn off what was wrong."""
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
    more = f" and {counted(others, 'more case')}" if others else ""
    raise WrongOperator(
        f"{device.description}: {said}{more}: do not train on this device. Report it with "
        "wgrad report-gpu; another driver, or --device cpu, may be right"
    )
