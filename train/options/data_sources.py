"""The values of --data: files, and their weights."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from wgrad.device.errors import WgradError

STDIN = "-"  # the path that stands for standard input
_WITH_WEIGHT = re.compile(r"(.+)=(\d{1,9}(?:\.\d{0,9})?|\.\d{1,9})", re.DOTALL)


@dataclass(frozen=True)
class Source:
    """A value of --data. weight: None if it has none."""

    path: str
    weight: float | None = None


def sources_of(values: Sequence[str]) -> list[Source]:
    """Parse the values of --data, each FILE or FILE=WEIGHT. A file whose own name ends in =WEIGHT is recognized.

    Raises:
        WgradError: Only some have weights, a weight is 0 or has no effect, or standard input is given twice.
    """
    sources = [_source(value) for value in values]
    without = [source.path for source in sources if source.weight is None]
    if without and len(without) < len(sources):
        raise WgradError(f"--data: {without[0]} has no weight, and others have: give each one (FILE=1), or none")
    if len(sources) == 1 and not without:
        raise WgradError(f"--data: {values[0]} is the only source: its weight would be ignored: leave it out")
    if [source.path for source in sources].count(STDIN) > 1:
        raise WgradError("--data: standard input can be read once: give a file")
    return sources


def _source(value: str) -> Source:
    found = None if os.path.exists(value) else _WITH_WEIGHT.fullmatch(value)
    if found is None:
        return Source(value)
    weight = float(found[2])
    if not weight:
        raise WgradError(f"--data: a weight must be above 0; got {value}: leave that source out")
    return Source(found[1], weight)
