"""The progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from wgrad.train.output import make_console


def duration(seconds: float) -> str:
    """1:02:03, 2:03, or -:-- where it is not known."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, left = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


class TrainingProgress:
    """Shows step, loss, learning rate, tokens/s and remaining time.

    A context manager. `update` after each step for which the loss is known; where the output is no terminal it
    prints one line each time `log_every` more steps are done, and one at the end.
    """

    def __init__(
        self, total_steps: int, steps_done: int = 0, log_every: int = 1, console: Console | None = None
    ) -> None:
        self.console = console or make_console()
        self.total_steps, self.steps_done, self.log_every = total_steps, steps_done, log_every
        self._begun, self._first, self._printed = time.monotonic(), steps_done, steps_done
        self._bar: Progress | None = None
        if self.console.is_terminal:
            columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("{task.fields[report]}"))
            self._bar = Progress(*columns, console=self.console, expand=True)  # the bar gives way, the figures stay
            self._task = self._bar.add_task("train", total=total_steps, completed=steps_done, report="")

    def remaining(self) -> float:
        """Seconds left, from the mean time of the steps so far; infinity before the first."""
        done = self.steps_done - self._first
        if done <= 0:
            return math.inf
        return (time.monotonic() - self._begun) / done * (self.total_steps - self.steps_done)

    def update(self, steps_done: int, *, loss: float, lr: float, tokens_per_second: float) -> None:
        """`steps_done` steps are behind us; loss and lr are those of the last one."""
        self.steps_done = steps_done
        report = f"loss {loss:.4f}  lr {lr:.2e}  {tokens_per_second:,.0f} tok/s  left {duration(self.remaining())}"
        if self._bar is not None:
            self._bar.update(self._task, completed=steps_done, report=report)
        elif steps_done >= self.total_steps or steps_done - self._printed >= self.log_every:
            self._printed = steps_done
            self.console.print(f"step {steps_done}/{self.total_steps}  {report}", markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a line without disturbing the bar."""
        self.console.print(text, markup=False, soft_wrap=True)

    def __enter__(self) -> TrainingProgress:
        self._begun, self._first = time.monotonic(), self.steps_done
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
