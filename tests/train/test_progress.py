"""Progress display: phases, plain lines at a bounded rate, and one live line that fits the terminal."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from wgrad.train.options.finetune_config import FinetuneConfig
from wgrad.train.options.option_text import size
from wgrad.train.plan.settle import settle
from wgrad.train.run.session import open_session
from wgrad.train.terminal.output import Output
from wgrad.train.terminal.progress import QUIET_SECONDS, Display, TrainingProgress, duration, frame


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Plain(Display):
    """A display without a terminal, on its own clock. `lines` is what it printed."""

    def __init__(self, width: int = 160) -> None:
        self.time, self.out = Clock(), io.StringIO()
        super().__init__(Console(file=self.out, width=width), self.time)

    @property
    def lines(self) -> list[str]:
        return self.out.getvalue().splitlines()

    def _tick_until(self, stop: Any) -> None:  # the test ticks
        pass


@contextmanager
def training(total: int, log_every: int, **options: Any) -> Iterator[tuple[Plain, Callable[[int], None]]]:
    display = Plain()
    with TrainingProgress(total, log_every=log_every, display=display, **options) as progress:
        yield (
            display,
            lambda step: progress.update(
                step, loss=1.23456, lr=2e-4, tokens_per_second=12345.6, left=2.0 * (total - step)
            ),
        )


# ---- without a terminal ------------------------------------------------------------------------
def test_a_line_each_log_every_steps_and_at_the_end() -> None:
    with training(7, 3) as (display, update):
        for step in range(1, 8):
            display.time.now += 2.0
            update(step)
    assert [line.split("  ")[0] for line in display.lines] == ["step 3/7", "step 6/7", "step 7/7"]
    assert display.lines[0] == "step 3/7  loss 1.2346  lr 2.00e-04  12,346 tok/s  left 0:08"
    assert "\x1b" not in display.out.getvalue()


def test_progress_prints_at_most_a_line_a_second() -> None:
    with training(1001, 1) as (display, update):
        for step in range(1, 1002):
            display.time.now += 0.01
            update(step)
    assert 9 <= len(display.lines) <= 12 and display.lines[-1].startswith("step 1001/1001")


def test_long_steps_print_lines_in_between() -> None:
    """--logging-steps is 100, a step takes 7 s: a line every other step; and one while a single step takes minutes."""
    with training(100, 100) as (display, update):
        for step in (1, 2, 3, 4):
            display.time.now += 7.0
            update(step)
        assert [line.split("  ")[0] for line in display.lines] == ["step 2/100", "step 4/100"]
        for _ in range(65):
            display.time.now += 1.0
            display.tick()
    assert len(display.lines) == 2 + 6 and display.lines[-1] == "step 5/100  1:00 so far"


def test_a_long_phase_says_how_far_it_is_and_a_short_one_nothing() -> None:
    display = Plain()
    with display.phase("tokenizing", 5, "examples") as phase:
        for done in range(1, 6):
            display.time.now += 1.0
            phase.update(done)
    assert display.lines == []
    with display.phase("compiling", unit="shaders") as phase:
        for done in range(31):
            phase.update(done, 41)
            display.time.now += 1.0
    at = {5: "0:36", 15: "0:26", 25: "0:16"}
    assert display.lines == [f"compiling  {done}/41 shaders  left {left}" for done, left in at.items()]


def test_a_run_shows_that_it_plans(
    make_checkpoint: Any, text_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring a GPU's rates and trying settings takes seconds."""

    def slow(*args: Any, **options: Any) -> Any:
        display.time.now += QUIET_SECONDS
        display.tick()
        return settle(*args, **options)

    display = Plain()
    monkeypatch.setattr("wgrad.train.run.session.settle", slow)
    options: dict[str, Any] = {"model": str(make_checkpoint()), "data": (str(text_data),), "out": str(tmp_path / "out")}
    open_session(FinetuneConfig(**options, device="cpu"), display=display)
    assert [line for line in display.lines if line.startswith("planning")] == ["planning  0:10"]


def test_a_phase_inside_another_is_shown_and_then_the_other_again() -> None:
    display = Plain()
    with display.phase("training", 10) as outer:
        outer.update(4)
        with display.phase("saving"):
            display.time.now += QUIET_SECONDS
            display.tick()
        display.time.now += QUIET_SECONDS
        display.tick()
    display.time.now += 100
    display.tick()  # nothing is in flight
    assert [line.split("  ")[0] for line in display.lines] == ["saving", "training"]


def test_a_long_step_says_how_long_it_takes() -> None:
    display = Plain()
    with TrainingProgress(7, display=display) as progress:
        display.time.now += QUIET_SECONDS
        display.tick()
        progress.update(2, loss=1.0, lr=1e-3, tokens_per_second=41)
        for _ in range(2):
            display.time.now += QUIET_SECONDS
            display.tick()
    assert [line.split("  ")[:2] for line in display.lines] == [
        ["step 0/7", "0:10"], ["step 2/7", "loss 1.0000"], ["step 3/7", "0:10 so far"], ["step 3/7", "0:20 so far"]
    ]  # fmt: skip


def test_silence_is_broken_by_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wgrad.train.terminal.progress.TICK_SECONDS", 0.001)
    out, time = io.StringIO(), Clock()
    display = Display(Console(file=out), time)
    with display.phase("loading weights", 3) as phase:
        phase.update(1)
        time.now += QUIET_SECONDS
        thread = display._thread
        assert thread is not None and thread.is_alive()
        while not out.getvalue():  # the test's own time limit ends this
            pass
    thread.join()
    assert out.getvalue().startswith("loading weights  1/3")


@pytest.mark.parametrize("kind", [{"TERM": "dumb"}, {"TERM": "unknown"}])
def test_a_dumb_terminal_gets_plain_lines(kind: dict[str, str]) -> None:
    out = io.StringIO()
    display = Display(Console(file=out, force_terminal=True, _environ=kind), Clock())
    with TrainingProgress(2, display=display) as progress:
        progress.update(2, loss=1.0, lr=1e-4, tokens_per_second=5.0)
    assert not display.live and "\x1b" not in out.getvalue() and "5 tok/s" in out.getvalue()


# ---- on a terminal -----------------------------------------------------------------------------
def drawn(width: int, **console: Any) -> str:
    """The live line of a run, as text without control codes."""
    display = Display(Console(file=io.StringIO(), width=width, force_terminal=True, **console), Clock())
    progress = TrainingProgress(5000, display=display, memory=lambda: 5 << 30)
    progress.update(1234, loss=2.3456, lr=2e-4, tokens_per_second=12345.6, left=3723.0)
    out = io.StringIO()
    paper = Console(file=out, width=width, **console)
    paper.print(frame(progress._phase, width))
    return out.getvalue()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120, 200])
def test_the_live_line_is_one_line_that_fits(width: int) -> None:
    text = drawn(width)
    assert text.count("\n") == 1 and len(text.rstrip("\n")) <= width
    shown = [name for name, part in FIGURES.items() if part in text]
    # Where there is less room the least telling figure goes first, and none is cut in half.
    assert shown == ORDER[: len(shown)] or width < 40
    assert len(shown) >= {20: 0, 40: 1, 60: 2, 80: 4}.get(width, 5)


FIGURES = {
    "loss": "loss 2.3456",
    "left": "left 1:02:03",
    "rate": "12,346 tok/s",
    "memory": "5.00 GiB",
    "lr": "lr 2.00e-04",
}
ORDER = ["loss", "left", "rate", "memory", "lr"]


def test_every_figure_is_there_from_the_first_step_on() -> None:
    with training(7, 1000, memory=lambda: 3 << 20) as (display, update):
        display.time.now += 2.0
        update(1)
        text = display._phases[-1].line()
    assert text == "step 1/7  loss 1.2346  lr 2.00e-04  12,346 tok/s  left 0:12  3.0 MiB"


def test_an_encoding_without_the_bars_characters_gets_others(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="latin-1")
    stream.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdout", stream)
    display = Display(Console(file=Output(), width=80, force_terminal=True, _environ={"TERM": "xterm"}))  # type: ignore[arg-type]
    with TrainingProgress(10, display=display) as progress:
        progress.update(5, loss=1.0, lr=1e-4, tokens_per_second=5.0)
    text = raw.getvalue().decode("latin-1")
    assert display.live and "step 5/10" in text and "-----" in text and "\\u" not in text


def test_no_color_is_followed() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, _environ={"TERM": "xterm-256color", "NO_COLOR": "1"})
    display = Display(console)
    with TrainingProgress(10, display=display) as progress:
        progress.update(5, loss=1.0, lr=1e-4, tokens_per_second=5.0)
    assert "step 5/10" in out.getvalue() and "\x1b[38" not in out.getvalue() and "\x1b[3" not in out.getvalue()


def test_lines_come_above_the_live_one() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, width=80, force_terminal=True, _environ={"TERM": "xterm"}))
    with display.phase("training", 10) as phase:
        phase.update(3)
        display.say("[not markup] held-out loss 1.5")
    assert "[not markup] held-out loss 1.5\n" in out.getvalue() and display._screen is None


def test_the_last_figures_of_a_run_stay() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, width=80, force_terminal=True, _environ={"TERM": "xterm"}))
    with TrainingProgress(10, display=display) as progress:
        progress.update(7, loss=1.5, lr=1e-4, tokens_per_second=50.0, left=3.0)
    assert out.getvalue().endswith("step 7/10  loss 1.5000  lr 1.00e-04  50 tok/s  left 0:03\n")


# ---- small things ------------------------------------------------------------------------------
@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3723, "1:02:03"), (math.inf, "-:--")])
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(3 << 19, "1.5 MiB"), (5 << 30, "5.00 GiB")])
def test_sizes_have_a_unit(count: int, text: str) -> None:
    assert size(count) == text
