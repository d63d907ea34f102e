"""A recorded list of dispatches of the wgpu device."""

from __future__ import annotations

from typing import Any

from wgrad.device.runtime import Recording
from wgrad.wgsl.runtime.submission_size import Submission


class Replay(Recording):
    """A recorded list of dispatches. Running it submits them again on the same buffers."""

    def __init__(self, runtime: Any) -> None:
        super().__init__(runtime)
        self.submissions: list[Submission] = []

    @property
    def dispatches(self) -> int:
        return sum(len(submission.dispatches) for submission in self.submissions)

    def run(self) -> None:
        self._runtime.flush()
        for submission in self.submissions:
            self._runtime._submit(submission)
