"""A Python caller's additions to a run's options; the command line has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from wgrad.device.errors import WgradError
from wgrad.train.data.given_records import Records
from wgrad.train.output.callbacks import Callbacks
from wgrad.train.step.hooks import Hooks


@dataclass(frozen=True)
class PythonCaller:
    """Arguments of `wgrad.finetune` that are no options.

    Attributes:
        records: In-memory data sets, by the name that stands for each in the options.
        callbacks: Callbacks of the run.
        hooks: Custom loss and metrics.
        silent: Print nothing, and turn signals into exceptions.
    """

    records: Mapping[str, Records] = field(default_factory=dict)
    callbacks: Callbacks = field(default_factory=Callbacks)
    hooks: Hooks = field(default_factory=Hooks)
    silent: bool = False

    def check_ranks(self, count: int) -> None:
        """Raise WgradError if these additions are for a run of one process, and this one has more ranks."""
        if count > 1 and (self.callbacks or self.hooks):
            what = "callbacks" if self.callbacks else "loss and metrics"
            raise WgradError(
                f"{what}: are for a run of one process, and this is one of {count} ranks: leave them out, or "
                "start one process"
            )
