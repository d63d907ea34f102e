"""A Python caller's additions to a run's options; the command line has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from wgrad.train.data.given_records import Records
from wgrad.train.output.callbacks import Callbacks
from wgrad.train.step.hooks import Hooks


@dataclass(frozen=True)
class PythonCaller:
    """records: in place of data files, by the name that stands for each in the options. silent: nothing is printed, and
    no signal ends the process but by an exception."""

    records: Mapping[str, Records] = field(default_factory=dict)
    callbacks: Callbacks = field(default_factory=Callbacks)
    hooks: Hooks = field(default_factory=Hooks)
    silent: bool = False
