"""Reports of `wgrad bench --json`, as files that `--compare` reads, and the test for "slower"."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec

import wgrad
from wgrad.autograd.bench.entry import Sizes
from wgrad.autograd.bench.roofline import Machine, MeasuredRoof, Row
from wgrad.device.contract import Device
from wgrad.device.errors import WgradError
from wgrad.train.commands.selftest import package_versions
from wgrad.train.files.decode import read_json

FORMAT = 1
SLOWER = 0.05
TRIES = 3  # of an operator that looks slower
_AGAIN = "make it anew with wgrad bench --json"

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class OldRoof(msgspec.Struct):
    """Return the parts of the file that are compared."""

    name: str
    spread: NotNegative


class OldRow(msgspec.Struct):
    name: str
    roof: str
    share: Positive
    spread: NotNegative


class OldDevice(msgspec.Struct):
    name: str
    description: str


class Report(msgspec.Struct):
    format: int
    size: str
    device: OldDevice
    roofs: list[OldRoof]
    rows: list[OldRow]


class _Format(msgspec.Struct):
    format: int


def make_report(device: Device, sizes: Sizes, machine: Machine, rows: Sequence[Row]) -> dict[str, Any]:
    """Everything that was measured, with device, driver and versions."""
    return {
        "format": FORMAT,
        "wgrad": wgrad.__version__,
        "size": sizes.name,
        "date": time.strftime("%Y-%m-%d"),
        "device": {"name": device.name, "description": device.description, "facts": device.facts},
        "system": {"platform": platform.platform(), "python": platform.python_version()},
        "packages": package_versions(),
        "launch_seconds": machine.launch_seconds,
        "roofs": [dataclasses.asdict(roof) for roof in machine.roofs.values()],
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def read_report(path: str) -> Report:
    """WgradError: not there, not JSON (cut off), of another version, not a report."""
    found = read_json(path, _Format, "--compare", _AGAIN)
    if found.format != FORMAT:
        raise WgradError(
            f"--compare: {path} has format {found.format}, and this version of wgrad reads format {FORMAT}: {_AGAIN}"
        )
    return read_json(path, Report, "--compare", _AGAIN)


def check_device(before: Report, path: str, device: Device) -> None:
    """WgradError where the file is of another card: its shares say nothing of this one."""
    if before.device.description.partition(" (")[0] != device.description.partition(" (")[0]:
        raise WgradError(
            f"--compare: {path} is of {before.device.description}, and this is {device.description}: compare with a "
            "file of this device"
        )


@dataclasses.dataclass(frozen=True)
class Change:
    """slower: by what share of its former speed, in units of the roofs; noise: what the spreads explain of it."""

    name: str
    slower: float
    noise: float

    @property
    def is_slower(self) -> bool:
        return self.slower > SLOWER + self.noise


@dataclasses.dataclass(frozen=True)
class Comparison:
    """missing: of the file, and not timed now."""

    changes: list[Change]
    missing: list[str]

    @property
    def slower(self) -> list[Change]:
        return [change for change in self.changes if change.is_slower]

    @property
    def unjudged(self) -> list[Change]:
        """Whose noise alone is more than what would be seen."""
        return [change for change in self.changes if change.noise > SLOWER]


def compare(before: Report, machine: Machine, rows: Sequence[Row], again: Callable[[str], Row]) -> Comparison:
    """Each row's share of its roof against the file's. An operator that looks slower is timed again (`again`, by its
    name), TRIES times in all, and its best counts. WgradError where the two have no row in common."""
    old = {row.name: row for row in before.rows}
    spreads = {roof.name: roof.spread for roof in before.roofs}
    changes = []
    for row in rows:
        if row.name not in old:
            continue
        change = _change(old[row.name], spreads, row, machine.roofs)
        for _ in range(TRIES - 1):
            if change.slower > SLOWER:
                change = min(
                    change, _change(old[row.name], spreads, again(row.name), machine.roofs), key=lambda c: c.slower
                )
        changes.append(change)
    if not changes:
        raise WgradError(f"--compare: none of its {len(old)} operators was timed now: give the same --op and --size")
    return Comparison(changes, sorted(set(old) - {row.name for row in rows}))


def _change(before: OldRow, spreads: dict[str, float], row: Row, roofs: dict[str, MeasuredRoof]) -> Change:
    """A median is off by half its spread at most, of the times and of the roofs, then and now."""
    spread = before.spread + row.spread + spreads.get(before.roof, 0.0) + roofs[row.roof].spread
    return Change(row.name, before.share / row.share - 1, spread / 2)
