"""The check before `auto` takes a HIP card: what it covers, what it keeps, and what it says of a process that fails."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from wgrad.autograd.selftest import probe as self_check
from wgrad.autograd.selftest.probe import Verdict
from wgrad.autograd.selftest.run import Result
from wgrad.device.child import Silent
from wgrad.device.errors import DeviceError, DeviceLost

ENDED: list[Any] = []  # processes that a test has ended


class Card:
    """A device with the attributes that `verdict` reads."""

    def __init__(self, *identity: str) -> None:
        self.identity, self.index = identity or ("a card", "gfx942", "70100000", "digest"), 3


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Set the output of the check's process for each run; an exception is raised. Empty: it must not run."""
    waiting: list[Any] = []

    class Process:
        """Stand-in for a Child."""

        errors: ClassVar[list[str]] = ["Memory access fault by GPU node-1"]

        def __init__(self, code: str, environment: Any) -> None:
            assert code.endswith("main(*('3',)))")  # the GPU's number
            self.answer = waiting.pop(0)
            self.lines = [] if isinstance(self.answer, BaseException) else self.answer.splitlines()

        def line(self, seconds: float) -> str | None:
            if isinstance(self.answer, BaseException):
                raise self.answer
            return self.lines.pop(0) if self.lines else None

        def status(self, seconds: float) -> int:
            return 3

        def end(self) -> None:
            ENDED.append(self)

    ENDED.clear()
    monkeypatch.setattr(self_check, "Child", Process)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return waiting


def said(passed: bool, keep: bool = True) -> str:
    return "a line of the driver\n3\n[]\n" + json.dumps(
        {"passed": passed, "reason": "" if passed else "off", "keep": keep}
    )


def test_cases_cover_what_training_needs() -> None:
    found = self_check.chosen_cases()
    operators = {case.op for case in found}
    assert len({case.name for case in found}) == len(found) > len(self_check.CASES)
    assert {case.compute_units for case in found} == {0, 1}
    assert any("gemm" in op for op in operators) and any("quantized" in op for op in operators)
    assert any("attention" in op for op in operators) and any("rms_norm" in op for op in operators)
    assert {case.direction for case in found} == {"forward", "backward"}


@pytest.mark.parametrize("passed", [True, False])
def test_a_verdict_is_kept(answers: list[Any], passed: bool) -> None:
    answers.append(said(passed))
    first = self_check.verdict(Card())
    assert first.passed == passed and not answers and len(ENDED) == 1
    again = self_check.verdict(Card())  # nothing runs
    assert again.passed == passed and again.reason.startswith(first.reason)
    assert ("delete it to check again" in again.reason) == (not passed)


@pytest.mark.parametrize("changed", range(4), ids=["card", "architecture", "driver", "kernels"])
def test_another_gpu_driver_or_kernel_is_checked_again(answers: list[Any], changed: int) -> None:
    answers.append(said(True))
    self_check.verdict(Card())
    other = list(Card().identity)
    other[changed] += "x"
    answers.append(said(False))
    assert not self_check.verdict(Card(*other)).passed and not answers
    assert self_check.verdict(Card()).passed


def test_what_may_pass_by_itself_is_not_kept(answers: list[Any]) -> None:
    answers += [said(False, keep=False), "", "no JSON\n", said(True)]
    assert self_check.verdict(Card()) == Verdict(False, "off")
    for _ in range(2):  # the process died
        reason = self_check.verdict(Card()).reason
        assert reason == "the check ended with status 3: Memory access fault by GPU node-1"
    assert self_check.verdict(Card()).passed


@pytest.mark.parametrize(
    "code, how",
    [
        ("os.kill(os.getpid(), 9)", "crashed (signal 9)"),
        ("os._exit(int(os.environ['OF_THE_CHECK']))", "ended with status 7"),
    ],
)
def test_a_check_that_crashes_names_the_signal(monkeypatch: pytest.MonkeyPatch, code: str, how: str) -> None:
    monkeypatch.setattr(self_check, "_CODE", f"import os; {code}")
    found, lasting = self_check.check_in_a_process("any", environment={"OF_THE_CHECK": "7"})
    assert found == Verdict(False, f"the check {how}: it said nothing") and not lasting


def test_a_check_that_hangs_is_kept(answers: list[Any]) -> None:
    """It would take its 600 seconds at the start of every run."""
    answers.append(Silent())
    for _ in range(2):
        assert self_check.verdict(Card()).reason.startswith("no result within 600 s")


def test_a_process_that_hangs_as_it_ends_has_told_its_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit handlers of a driver may never come back."""
    code = f"import time; print('a driver'); print({said(True).splitlines()[-1]!r}, flush=True); time.sleep(60)"
    monkeypatch.setattr(self_check, "_CODE", code.replace("{", "{{").replace("}", "}}"))
    begun = time.monotonic()
    assert self_check.check_in_a_process("any") == (Verdict(True, ""), True)
    assert time.monotonic() - begun < 30


def test_a_check_that_stops_the_machine_is_not_run_again(answers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A check begun since the machine started may go on in another process, and is no verdict."""
    monkeypatch.setattr(self_check, "_start_of_machine", lambda: "Monday")
    answers += [KeyboardInterrupt(), KeyboardInterrupt()]
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            self_check.verdict(Card())
    monkeypatch.setattr(self_check, "_start_of_machine", lambda: "Tuesday")
    found = self_check.verdict(Card())
    assert not found.passed and found.reason.startswith("the machine stopped while it ran (kept in ")


def test_a_check_that_ended_stops_no_machine(answers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a lasting result leaves no note behind."""
    for day in ("Monday", "Tuesday"):
        monkeypatch.setattr(self_check, "_start_of_machine", lambda day=day: day)
        answers.append(said(False, keep=False))
        assert self_check.verdict(Card()) == Verdict(False, "off")


@pytest.mark.parametrize("name, value", [("FORMAT", 0), ("CASES", self_check.CASES[1:]), ("wgrad.__version__", "x")])
def test_what_another_wgrad_has_found_is_checked_again(
    answers: list[Any], monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    answers += [said(True), said(False)]
    assert self_check.verdict(Card()).passed
    monkeypatch.setattr(f"wgrad.autograd.selftest.probe.{name}", value)
    assert not self_check.verdict(Card()).passed and not answers


WRONG = Result("a case", "add", "forward", "float32", "3", "y", 0.5, 0.25, False)
RIGHT = replace(WRONG, name="another", error=0.125, ok=True)


@pytest.mark.parametrize(
    "results, reason, lasting",
    [
        ([RIGHT], "", True),
        ([WRONG, RIGHT], "1 of 2 cases failed, first a case: y is off by 0.5, allowed 0.25", True),
        ([RIGHT, replace(WRONG, message="OutOfMemory: 5")], "1 of 2 cases failed, first a case: OutOfMemory: 5", False),
        (DeviceError("no driver\nmore"), "no driver", False),
        (DeviceLost("gone"), "gone", True),
    ],
    ids=["right", "wrong", "memory", "error", "lost"],
)
def test_a_report_is_read_as_it_was_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], results: Any, reason: str, lasting: bool
) -> None:
    def check(device: Any, _cases: Any) -> Any:
        if isinstance(results, DeviceError):
            raise results
        return results

    monkeypatch.setattr(self_check, "compile_and_check", check)
    assert self_check.report(lambda: SimpleNamespace(lanes=16), []) == 0
    lanes = 0 if isinstance(results, DeviceError) else 16
    assert self_check._verdict_in(capsys.readouterr().out) == (Verdict(not reason, reason, lanes), lasting)


@pytest.mark.parametrize("text", ["{", "{}", "[]", "null", "[" * 60_000], ids=lambda text: text[:5])
def test_a_damaged_note_is_made_again(answers: list[Any], tmp_path: Path, text: str) -> None:
    answers.append(said(True))
    self_check.verdict(Card())
    (note,) = tmp_path.glob("wgrad/hip/self-check-*.json")
    note.write_text(text)
    answers.append(said(True))
    assert self_check.verdict(Card()).passed and not answers


def test_a_cache_that_cannot_be_written_to_is_no_error(answers: list[Any], tmp_path: Path) -> None:
    (tmp_path / "wgrad").write_text("a file")
    answers += [said(True), said(True), said(False, keep=False)]
    assert [self_check.verdict(Card()).passed for _ in range(3)] == [True, True, False]
