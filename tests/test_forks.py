"""Runs of tests in forked processes: results, crashes, and what is left to pytest-xdist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import forks

TESTS = """
import os, pathlib, signal, threading, warnings, pytest

here = pathlib.Path(__file__).parent

def note(name, word):
    with (here / name).open("a") as file:
        file.write(word + "\\n")

note("collected", "once")

@pytest.fixture(scope="module")
def module():
    note("begun", os.environ["PYTEST_XDIST_WORKER"])
    yield
    note("ended", os.environ["PYTEST_XDIST_WORKER"])

def test_is_killed(): os.kill(os.getpid(), signal.SIGKILL)
def test_fails(module): print("said" + " by the test"); assert [1, 2] == [1, 3]
def test_warns(): warnings.warn("a" + " warning")
@pytest.mark.parametrize("i", range(60))
def test_passes(i, tmp_path, module): (tmp_path / "a").write_text(""); note("passed", str(i))
@pytest.mark.skip(reason="a reason")
def test_is_skipped(): pass
@pytest.mark.xfail
def test_is_expected_to_fail(): assert 0
def test_leaves(): os._exit(3)
def test_is_the_last(capfd): os.write(1, b"x"); assert capfd.readouterr().out == "x"
"""


def run(folder: Path, *options: str) -> tuple[int, str]:
    """Return the exit status and the output of a run of TESTS."""
    (folder / "test_a.py").write_text(TESTS)
    words = ["-q", "-ra", "-p", "tests.forks", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", *options]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "-c", "/dev/null", "--rootdir", str(folder), str(folder)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="tests are forked on Linux only")
def test_forked_processes_report_every_result(tmp_path: Path) -> None:
    status, text = run(tmp_path, "--forks", "3")
    assert status == 1, text
    assert re.search(r"3 failed, 62 passed, 1 skipped, 1 xfailed, 1 warning in", text), text
    for line in (
        r"E  +assert \[1, 2\] == \[1, 3\]",
        "said by the test",
        "UserWarning: a warning",
        "the process that ran this test ended by SIGKILL",
        "the process that ran this test ended with status 3",
        r"SKIPPED \[1\] .*: a reason",
    ):
        assert re.search(line, text), (line, text)

    def lines(name: str) -> list[str]:
        return (tmp_path / name).read_text().splitlines()

    assert lines("collected") == ["once"]
    assert sorted(map(int, lines("passed"))) == list(range(60))  # each once, whichever process crashed
    begun, ended = lines("begun"), lines("ended")
    assert len(set(begun)) == len(begun) >= 2 and set(ended) <= set(begun)


@pytest.mark.skipif(sys.platform != "linux", reason="tests are forked on Linux only")
def test_a_run_ends_at_the_first_failure_on_request(tmp_path: Path) -> None:
    status, text = run(tmp_path, "--forks", "2", "-x", "-k", "fails or passes")
    assert status == 1 and "stopping after 1 failures" in text, text
    begun, ended = ((tmp_path / name).read_text().split() for name in ("begun", "ended"))
    assert sorted(begun) == sorted(ended) and len(set(begun)) == len(begun)


def config(**given: Any) -> Any:
    option = SimpleNamespace(forks="auto", numprocesses=None, maxprocesses=None, collectonly=False, usepdb=False)
    vars(option).update(given)
    hook = SimpleNamespace(pytest_xdist_auto_num_workers=lambda config: 9)
    return SimpleNamespace(option=option, hook=hook)


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({}, 9),
        ({"maxprocesses": 4}, 4),
        ({"forks": "3"}, 3),
        ({"forks": "0"}, 0),
        ({"numprocesses": 2}, 0),
        ({"usepdb": True}, 0),
        ({"collectonly": True}, 0),
    ],
)
def test_options_set_the_number_of_processes(given: dict[str, Any], count: int) -> None:
    assert forks._count(config(**given)) == count


@pytest.mark.parametrize(
    ("platform", "given", "processes"),
    [("darwin", "auto", "auto"), ("win32", "3", 3), ("win32", "0", None), ("linux", "auto", None)],
)
def test_other_systems_have_pytest_xdist(
    platform: str, given: str, processes: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    chosen = config(forks=given)
    forks.pytest_cmdline_main(chosen)
    assert chosen.option.numprocesses == processes


def test_a_process_with_threads_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "threads", lambda: 2)
    session: Any = SimpleNamespace(config=config(), items=[None, None], testsfailed=0)
    with pytest.raises(pytest.UsageError, match="a process with several threads cannot be forked: run without --forks"):
        forks.pytest_runtestloop(session)
