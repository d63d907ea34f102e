"""Files of `wgrad report-gpu` as `wgrad bench --compare` reads them, and the test for "slower"."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec

from wgrad.autograd.bench.entries import operator_names
from wgrad.autograd.bench.roofline import Machine, MeasuredRoof, Row
from wgrad.device.contract import Device
from wgrad.device.errors import WgradError
from wgrad.train.files.decode import read_json
from wgrad.train.options.option_names import did_you_mean

FORMAT = 1  # of report-gpu's file
SLOWER = 0.05
TRIES = 3  # timings of an operator that looks slower
_AGAIN = "make it anew with wgrad report-gpu --only rates"

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]


def check_operators(names: Sequence[str]) -> None:
    """Raise WgradError if a name of --op is no operator that is timed."""
    known = operator_names()
    for name in names:
        if name not in known:
            near = did_you_mean(name, known)
            raise WgradError(f"--op: {name!r} is no operator{near}: leave out --op to time all of them")


class OldRoof(msgspec.Struct):
    name: str
    spread: NotNegative


class OldRow(msgspec.Struct):
    name: str
    roof: str
    share: Positive
    spread: NotNegative


class OldDevice(msgspec.Struct):
    description: str


class OldRates(msgspec.Struct):
    size: str
    roofs: list[OldRoof]
    rows: list[OldRow]


class Report(msgspec.Struct):
    """The parts of a report that are compared."""

    device: OldDevice
    rates: OldRates


class _Format(msgspec.Struct):
    format: int
    launch_seconds: float | None = None  # the former bench --json had it here


def read_report(path: str) -> Report:
    """Read a report. WgradError: it is missing, no JSON (cut off), of another version, or no report."""
    found = read_json(path, _Format, "--compare", _AGAIN)
    if found.launch_seconds is not None:
        raise WgradError(f"--compare: {path} is of the former wgrad bench --json: {_AGAIN}")
    if found.format != FORMAT:
        raise WgradError(
            f"--compare: {path} has format {found.format}, and this version of wgrad reads format {FORMAT}: {_AGAIN}"
        )
    return read_json(path, Report, "--compare", _AGAIN)


def check_device(before: Report, path: str, device: Device) -> None:
    """Raise WgradError if the report is of another GPU, whose shares cannot be compared."""
    if before.device.description.partition(" (")[0] != device.description.partition(" (")[0]:
        raise WgradError(
            f"--compare: {path} is of {before.device.description}, and this is {device.description}: compare with a "
            "file of this device"
        )


@dataclasses.dataclass(frozen=True)
class Change:
    """Change of an operator's share of its peak rate.

    Attributes:
        name: The operator.
        slower: By what fraction it is slower than before; negative: faster.
        noise: The part of that which the spreads of the timings can explain.
    """

    name: str
    slower: float
    noise: float

    @property
    def is_slower(self) -> bool:
        return self.slower > SLOWER + self.noise


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Changes of all operators. missing: those of the report that were not timed now."""

    changes: list[Change]
    missing: list[str]

    @property
    def slower(self) -> list[Change]:
        return [change for change in self.changes if change.is_slower]

    @property
    def unjudged(self) -> list[Change]:
        """Changes whose noise exceeds the limit for slower."""
        return [change for change in self.changes if change.noise > SLOWER]


def compare(before: Report, machine: Machine, rows: Sequence[Row], again: Callable[[str], Row]) -> Comparison:
    """Compare each operator's share of its peak rate with that of a report.

    Args:
        before: The report.
        machine: Peak rates measured now.
        rows: Operators timed now.
        again: Times an operator again, by name. One that looks slower is timed TRIES times, and the best counts.

    Raises:
        WgradError: The report has none of the operators.
    """
    old = {row.name: row for row in before.rates.rows}
    spreads = {roof.name: roof.spread for roof in before.rates.roofs}
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
    """Compare one operator. Each median, of times and peak rates, then and now, is off by at most half its spread."""
    spread = before.spread + row.spread + spreads.get(before.roof, 0.0) + roofs[row.roof].spread
    return Change(row.name, before.share / row.share - 1, spread / 2)
