"""Output of a run cannot end it: streams may be closed, full, missing, or lack a character."""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
from typing import Any

import pytest

from wgrad.train.terminal.output import Output, OutputLost, command_output, make_console, say, settle
from wgrad.train.terminal.progress import Display, TrainingProgress


class Broken(io.StringIO):
    """Takes nothing."""

    def __init__(self, number: int, tty: bool = False) -> None:
        super().__init__()
        self.number, self.tty = number, tty

    def write(self, text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))

    def flush(self) -> None:
        raise OSError(self.number, os.strerror(self.number))

    def isatty(self) -> bool:
        return self.tty


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


STREAMS = {
    "reader gone": lambda: Broken(errno.EPIPE),
    "disk full": lambda: Broken(errno.ENOSPC),
    "terminal gone": lambda: Broken(errno.EIO, tty=True),
    "closed": closed,
    "none": lambda: None,
}


@pytest.mark.parametrize("kind", STREAMS)
def test_output_to_a_broken_stream_raises_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", STREAMS[kind]())
    say("a line")
    settle()
    Output().isatty()
    console = make_console()
    console.print("a [bold]line[/bold] → ✓")
    with console.status("loading"):
        pass
    with TrainingProgress(3, console=console) as progress:
        progress.update(1, loss=1.0, lr=1e-3, tokens_per_second=1.0)
        progress.note("a note")
    monkeypatch.undo()


@pytest.mark.parametrize(("encoding", "text"), [("ascii", "\\xe9 \\u2192"), ("latin-1", "é \\u2192"), ("utf-8", "é →")])
def test_what_the_encoding_lacks_is_escaped(encoding: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    say("é →")
    make_console().print("é →")
    with command_output():
        print("é →")
    assert raw.getvalue().decode(encoding).splitlines() == [text] * 3


def test_lone_surrogates_are_escaped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="utf-8"))
    say("out-\udce9")
    assert raw.getvalue() == b"out-\\udce9\n"


def test_a_bar_on_a_terminal_writes_through_the_stream_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live display puts its own stream in the place of sys.stdout; what is said meanwhile must not go in circles."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with TrainingProgress(3, console=make_console()) as progress:
        assert sys.stdout is not terminal
        say("in between")
        worker = threading.Thread(target=progress.note, args=("from a thread",))
        worker.start()
        worker.join()
        progress.update(1, loss=1.0, lr=1e-3, tokens_per_second=1.0)
    assert "in between" in terminal.getvalue() and "from a thread" in terminal.getvalue()


def test_a_command_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    stream: Any = Broken(errno.ENOSPC)
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(OutputLost) as caught, command_output():
        print("x")
    assert caught.value.errno == errno.ENOSPC
    assert sys.stdout is stream
    with pytest.raises(FileNotFoundError), command_output():  # an error of something else stays what it is
        open("/nowhere/at/all")


def test_names_of_files_cannot_command_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    say("data: \x1b[2J\x9b31m\rx\ty")
    Display(make_console()).say("note: \x1b]0;title\x07 [red]é")
    assert stream.getvalue() == "data: \\x1b[2J\\x9b31m\\rx\ty\nnote: \\x1b]0;title\\x07 [red]é\n"
