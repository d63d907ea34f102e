"""A child process: its lines, its end, and one that does not end."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
from typing import Any

import pytest

from wgrad.device import bounded, child
from wgrad.device.child import Child, Silent


def test_a_child_returns_lines_status_and_errors() -> None:
    found = Child("import sys; print('one'); print('two'); print('bad', file=sys.stderr); sys.exit(3)", os.environ)
    assert [found.line(60), found.line(60), found.line(60), found.status(60)] == ["one", "two", None, 3]
    found.end()
    assert found.errors == ["bad"]


def test_a_process_without_a_word_is_silent_and_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "LOOK", 0.05)
    found = Child("import time; time.sleep(60)", os.environ)
    for wait in (found.line, found.status):
        with pytest.raises(Silent):
            wait(0.2)
    found.end()
    assert found.status(1) != 0


def test_time_in_which_nothing_runs_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes are stopped, or the machine sleeps: one wait is late at once, and the line comes after it."""
    found = Child("print('here')", os.environ)
    lines, late = found._lines, [True, True]

    class Late:
        def get(self, timeout: float) -> Any:
            if late:
                late.pop()
                raise queue.Empty
            return lines.get(timeout=timeout)

    monkeypatch.setattr(found, "_lines", Late())
    assert found.line(3.0) == "here" and not late
    found.end()


@pytest.mark.skipif(sys.platform == "win32", reason="a process that cannot be killed, in place of a driver that waits")
def test_a_process_that_cannot_be_killed_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits inside its driver: `end` comes back."""
    monkeypatch.setattr(child, "_END", 0.05)
    monkeypatch.setattr(child, "_JOIN", 0.05)
    found = Child("import time; time.sleep(60)", os.environ)
    process: subprocess.Popen[str] = found._process
    with monkeypatch.context() as patch:
        patch.setattr(process, "kill", lambda: None)
        found.end()
    assert process.poll() is None
    process.kill()
    assert found.status(10) != 0
