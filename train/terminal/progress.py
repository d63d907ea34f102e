"""Progress display: a live line on a terminal, elsewhere plain lines at moderate intervals.

Work is shown in phases ("loading weights", "training", ...), one at a time. Output errors never end a run: the console
comes from `output.make_console`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from wgrad.train.options.option_text import size
from wgrad.train.terminal.output import STDOUT, harmless, make_console

QUIET_SECONDS = 10.0  # longest time between plain lines
LINE_SECONDS = 1.0  # shortest time between plain lines of training
TICK_SECONDS = 1.0  # between checks for a long silence
_MIN_BAR = 8  # columns; figures are left out to make room for it
_MAX_BAR = 40
_P = TypeVar("_P", bound="Phase")


def duration(seconds: float) -> str:
    """Return a duration as 1:02:03 or 2:03, or -:-- if it is not known."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, left = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


class Phase:
    """A phase of work, shown with its progress.

    Args:
        display: Where it is shown.
        name: Name of the work.
        total: Number of units; None: not known.
        unit: Name of a unit.
        done: Units done at the start.

    Attributes:
        give_way: Figures to leave out on a narrow terminal, in this order.
    """

    give_way: tuple[str, ...] = ()

    def __init__(self, display: Display, name: str, total: int | None = None, unit: str = "", done: int = 0) -> None:
        self.display, self.name, self.total, self.unit, self.done = display, name, total, unit, done
        self._begun, self._first = display.clock(), done

    def update(self, done: int, total: int | None = None) -> None:
        """Set the number of units done, and of all if that has become known."""
        self.done, self.total = done, self.total if total is None else total
        self.display.refresh(self)

    def remaining(self) -> float:
        """Return the seconds left, at the mean speed so far; infinity: not known."""
        done = self.done - self._first
        if done <= 0 or self.total is None:
            return math.inf
        return (self.display.clock() - self._begun) / done * (self.total - self.done)

    def label(self) -> str:
        """Return name and progress of the phase."""
        return " ".join(part for part in (self.name, self.counts()) if part)

    def counts(self) -> str:
        """Return the progress, such as '3/7 tensors'; '': there is nothing to count."""
        if self.total is None:
            return f"{self.done} {self.unit}".strip() if self.done else ""
        return f"{self.done}/{self.total} {self.unit}".strip()

    def figures(self) -> Mapping[str, str]:
        """Return further values to show, by name."""
        left = self.remaining()
        if math.isfinite(left):
            return {"left": f"left {duration(left)}"}
        return {"time": duration(self.display.clock() - self._begun)}

    def line_due(self, now: float, last_line: float) -> bool:
        """Return whether a plain line is due after an update."""
        return now - last_line >= QUIET_SECONDS

    def line(self) -> str:
        """Return the plain line."""
        return "  ".join(part for part in (self.name, self.counts(), *self.figures().values()) if part)

    def waiting_line(self) -> str:
        """Return the plain line that ends a silence."""
        return self.line()


class Display:
    """Shows the current phase, and lines above it. clock: returns seconds, for tests."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = make_console() if console is None else console
        self.clock = clock
        self.live = self.console.is_terminal and not self.console.is_dumb_terminal
        self._phases: list[Phase] = []  # the last one is shown, the others when it has ended
        self._screen: Live | None = None
        self._lock = threading.RLock()  # one plain line at a time
        self._last_line = clock()
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def say(self, text: str) -> None:
        """Print a line without disturbing the phase."""
        self._last_line = self.clock()
        self.console.print(harmless(text), markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Phase]:
        """Show a phase for as long as the block runs."""
        with self.show(Phase(self, name, total, unit)) as phase:
            yield phase

    @contextmanager
    def show(self, phase: _P) -> Iterator[_P]:
        """Show a phase for as long as the block runs, and afterwards the previous one again."""
        self._phases.append(phase)
        if len(self._phases) == 1:
            self._begin()
        try:
            yield phase
        finally:
            if len(self._phases) == 1:
                self._end()
            self._phases.remove(phase)

    def refresh(self, phase: Phase) -> None:
        """Print a phase's new figures if a plain line is due. On a terminal, the next frame shows them."""
        if self.live:
            return
        with self._lock:
            if phase.line_due(self.clock(), self._last_line):
                self.say(phase.line())

    def tick(self) -> None:
        """End a long silence with a plain line, if the output is no terminal."""
        with self._lock:
            if self._phases and self.clock() - self._last_line >= QUIET_SECONDS:
                self.say(self._phases[-1].waiting_line())

    def _begin(self) -> None:
        if self.live:
            # Print the output of others above the line if it goes to the same stream.
            stdout = getattr(self.console.file, "name", "") == STDOUT
            self._screen = Live(
                get_renderable=self._frame,
                console=self.console,
                transient=True,
                redirect_stdout=stdout,
                redirect_stderr=stdout,
            )
            self._screen.start()
        else:
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._tick_until, args=(self._stop,), daemon=True)
            self._thread.start()

    def _end(self) -> None:
        if self._screen is not None:
            self._screen.stop()
            self._screen = None
        if self._stop is not None:
            self._stop.set()
            self._stop = self._thread = None

    def _tick_until(self, stop: threading.Event) -> None:
        while not stop.wait(TICK_SECONDS):
            self.tick()

    def _frame(self) -> RenderableType:
        shown = self._phases[-1:]  # one access, because a thread of rich calls this
        return frame(shown[0], self.console.width) if shown else Text()


def frame(phase: Phase, width: int) -> RenderableType:
    """Return one line of at most `width` columns: label, bar and figures.

    If there is no room for all, figures are left out in the order of `give_way`, and the bar before the last two.
    """
    label, figures = phase.label(), dict(phase.figures())

    def length(bar: int) -> int:
        return len(label) + bar + sum(2 + len(figure) for figure in figures.values())

    for name in phase.give_way[:-2]:
        if length(_MIN_BAR + 2) > width:
            figures.pop(name, None)
    bar = length(_MIN_BAR + 2) <= width
    for name in (*phase.give_way[-2:], *figures):
        if length(0) > width:
            figures.pop(name, None)
    row: list[RenderableType] = [Text(label[:width], no_wrap=True)]
    if bar:
        room = min(_MAX_BAR, width - length(2))
        row.append(ProgressBar(phase.total, phase.done, width=room, pulse=phase.total is None))
    row += [Text(figure, no_wrap=True) for figure in figures.values()]
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_row(*row)
    return grid


class _Training(Phase):
    """The phase of training steps. log_every: steps between plain lines. values: figures of the last step."""

    give_way = ("lr", "memory", "rate", "left", "loss")

    def __init__(self, display: Display, total: int, done: int, log_every: int) -> None:
        super().__init__(display, "training", total, done=done)
        self.values: dict[str, str] = {}
        self._log_every, self._printed, self._printed_at = log_every, done, -math.inf

    def label(self) -> str:
        return f"step {self.done}/{self.total}"

    def figures(self) -> Mapping[str, str]:
        return self.values or super().figures()

    def line_due(self, now: float, last_line: float) -> bool:
        at_end = self.done >= (self.total or 0)
        due = self.done - self._printed >= self._log_every and now - self._printed_at >= LINE_SECONDS
        if at_end or due or super().line_due(now, last_line):
            self._printed, self._printed_at = self.done, now
            return True
        return False

    def line(self) -> str:
        return "  ".join((self.label(), *self.figures().values()))

    def waiting_line(self) -> str:
        """Return how long the current step has taken, if the line of the last one was printed."""
        if self.done != self._printed or not self.values:
            return self.line()
        return f"step {self.done + 1}/{self.total}  {duration(self.display.clock() - self._printed_at)} so far"


class TrainingProgress:
    """Context manager that shows step, loss, learning rate, tokens/s, remaining time and device memory of a run.

    If the output is no terminal, it prints a line every `log_every` steps, at the end, and after a long silence.

    Args:
        total_steps: Steps of the run.
        steps_done: Steps done before it was resumed.
        log_every: Steps between plain lines.
        console: Console to make a display on, if `display` is None.
        display: Display to use.
        memory: Returns the bytes in use on the device.
    """

    def __init__(
        self,
        total_steps: int,
        steps_done: int = 0,
        log_every: int = 1,
        console: Console | None = None,
        *,
        display: Display | None = None,
        memory: Callable[[], int] | None = None,
    ) -> None:
        self.display = Display(console) if display is None else display
        self.total_steps, self.steps_done, self.memory = total_steps, steps_done, memory
        self._phase = _Training(self.display, total_steps, steps_done, log_every)
        self._shown = self.display.show(self._phase)

    def update(
        self, steps_done: int, *, loss: float, lr: float, tokens_per_second: float, left: float = math.inf
    ) -> None:
        """Show the figures of the last finished step. left: seconds to the end."""
        self.steps_done = self._phase.done = steps_done
        rate = f"{tokens_per_second:,.0f}" if tokens_per_second >= 10 else f"{tokens_per_second:.2g}"
        self._phase.values = {
            "loss": f"loss {loss:.4f}",
            "lr": f"lr {lr:.2e}",
            "rate": f"{rate} tok/s",
            "left": f"left {duration(left)}",
            **({"memory": size(self.memory())} if self.memory is not None else {}),
        }
        self._phase.update(steps_done)

    def note(self, text: str) -> None:
        """Print a line without disturbing the bar."""
        self.display.say(text)

    def __enter__(self) -> TrainingProgress:
        self._shown.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shown.__exit__(kind, error, trace)
        if self.display.live and self._phase.values:  # keep the last figures of the live line
            self.display.say(self._phase.line())
