"""Requests to end a run: they are answered at once, also during long calls, and lose nothing that is written."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import few_steps
from wgrad.__main__ import main as command
from wgrad.train.commands.cli import main
from wgrad.train.terminal.end_requests import EndRequests
from wgrad.train.terminal.interrupts import SIGNALS, Interrupted, Interrupts

posix = pytest.mark.skipif(os.name == "nt", reason="signals of another process")


class Answers:
    """Collects answers to requests; `wait` returns the next one."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._more = threading.Semaphore(0)

    def __call__(self, text: str) -> None:
        self.said.append(text)
        self._more.release()

    def wait(self) -> str:
        assert self._more.acquire(timeout=300)
        return self.said[-1]


def press(number: int = signal.SIGINT) -> None:
    signal.raise_signal(number)


def test_where_nothing_can_be_lost_it_ends_at_once() -> None:
    with pytest.raises(Interrupted) as caught, Interrupts(Answers()):
        press(signal.SIGTERM)
        raise AssertionError("not reached")
    assert caught.value.number == signal.SIGTERM


def test_the_first_waits_for_the_step_and_the_second_does_not() -> None:
    answers, reached = Answers(), []
    with pytest.raises(Interrupted), Interrupts(answers) as interrupts, interrupts.steps():
        press()
        assert interrupts.asked == signal.SIGINT
        assert answers.wait() == "saving after this step; again to stop now"
        reached.append("after the first")
        press()
        reached.append("after the second")
    assert reached == ["after the first"]


def test_nothing_ends_what_is_being_written() -> None:
    answers, written = Answers(), []
    with pytest.raises(Interrupted), Interrupts(answers) as interrupts, interrupts.steps():
        with interrupts.writing():
            for _ in range(3):
                press()
                assert answers.wait() == "files are being written: the run ends when they are whole"
            written.append("whole")
        written.append("the step goes on")  # and sees `asked`
    assert written == ["whole", "the step goes on"]


def test_writing_alone_ends_when_it_is_done() -> None:
    done = []
    with pytest.raises(Interrupted), Interrupts(Answers()) as interrupts:
        with interrupts.writing():
            press()
            done.append("written")
        done.append("not reached")
    assert done == ["written"]


def test_the_handlers_of_before_are_back_afterwards() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    with Interrupts(Answers()):
        assert [signal.getsignal(number) for number in numbers] != before
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_signals_that_are_ignored_stay_so() -> None:
    """`nohup wgrad ... &`: hanging up is not to end it."""
    if not hasattr(signal, "SIGHUP"):
        pytest.skip("this system has no SIGHUP")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts(Answers()):
            press(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_nothing_is_handled() -> None:
    seen = []

    def work() -> None:
        with Interrupts(Answers()) as interrupts, interrupts.steps():
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


@posix
def test_the_answer_comes_while_the_main_thread_is_in_a_long_call() -> None:
    """As in the first compile of shaders: the handler cannot run there. Here the answer ends the call."""
    reader, writer = os.pipe()
    unblocked_by: list[str] = []

    def answer(text: str) -> None:
        unblocked_by.append(text)
        os.write(writer, b"x")

    def give_up() -> None:
        unblocked_by.append("the clock")
        os.write(writer, b"x")

    clock = threading.Timer(120, give_up)
    buffer = ctypes.create_string_buffer(1)
    long_call = ctypes.CDLL(None).read  # gives Python's lock back, and takes it only when a byte has come
    ready = threading.Event()

    def other() -> None:  # a signal that meets this thread leaves the main thread in its call
        ready.set()
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted), Interrupts(answer) as interrupts, interrupts.steps():
        clock.start()
        threading.Thread(target=other).start()
        ready.wait()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        long_call(reader, buffer, 1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        clock.cancel()
    assert unblocked_by == ["saving after this step; again to stop now"]


STUCK = """
import ctypes, os, signal, sys, threading, time
from wgrad.train.terminal import interrupts
interrupts.GRACE = 0.3
reader, writer = os.pipe()
masked = threading.Event()
def press():
    masked.wait()
    for _ in range(2):
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
    if sys.argv[1] == "writing":
        os.write(writer, b"x")
with interrupts.Interrupts(lambda text: print(text, flush=True)) as held, held.steps():
    threading.Thread(target=press, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the other thread takes it
    masked.set()
    stuck = lambda: ctypes.CDLL(None).read(reader, ctypes.create_string_buffer(1), 1)
    if sys.argv[1] == "writing":
        with held.writing():
            stuck()
        print("written", flush=True)
    else:
        stuck()
"""


@posix
@pytest.mark.parametrize(("what", "last"), [("step", "stopped at once"), ("writing", "written")])
def test_the_second_ends_a_process_that_does_not_come_back(what: str, last: str) -> None:
    """But not while it writes."""
    done = subprocess.run([sys.executable, "-c", STUCK, what], capture_output=True, text=True, timeout=300)
    assert last in done.stdout.splitlines()[-1]
    assert done.returncode == (143 if what == "step" else 1)  # 1: Interrupted, which nobody caught


# ---- a command that has nothing to save ----------------------------------------------------------
IMPORTING = """
import os, signal, sys
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["PRESS_AT"]:
            signal.raise_signal(int(os.environ["PRESS"]))
sys.meta_path.insert(0, Press())
from wgrad.__main__ import main
sys.exit(main())
"""


def test_the_command_starts_where_requests_to_end_are_answered() -> None:
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"wgrad": "wgrad.__main__:main"}


@posix
@pytest.mark.parametrize("module", ["argparse", "numpy", "wgrad.train.commands.devices"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_while_modules_are_imported_is_answered_with_one_line(module: str, number: int) -> None:
    environment = os.environ | {"PRESS_AT": module, "PRESS": str(int(number))}
    command = [sys.executable, "-c", IMPORTING, "devices"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "wgrad: interrupted\n")


def test_nothing_is_collected_once_the_command_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's last collections took up to 0.3 s of each command, in which Ctrl-C had no handler."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    monkeypatch.setattr(sys, "argv", ["wgrad", "--version"])
    kept = [before]  # the collector tracks it
    try:
        assert command() == 0
        assert not any(known is kept for known in gc.get_objects())
    finally:
        gc.unfreeze()
        for number, handler in before.items():
            signal.signal(number, handler)
    assert any(known is kept for known in gc.get_objects())


@posix
def test_a_request_that_python_loses_in_a_finalizer_is_made_again(capsys: Any) -> None:
    class Pressing:
        def __del__(self) -> None:
            press(signal.SIGTERM)

    with pytest.raises(Interrupted) as caught, EndRequests():
        Pressing()
        time.sleep(100)
    assert caught.value.number == signal.SIGTERM
    assert capsys.readouterr().err == ""


@posix
def test_a_failure_right_after_a_lost_request_is_an_interruption(capsys: Any) -> None:
    """wgpu's request for a device fails where Ctrl-C is raised in its callback, in which Python loses it."""

    @ctypes.CFUNCTYPE(None)
    def pressing() -> None:
        press(signal.SIGINT)

    before = _handling()
    with pytest.raises(Interrupted) as caught, EndRequests():
        pressing()
        raise AssertionError
    assert caught.value.number == signal.SIGINT and _handling() == before
    assert isinstance(caught.value.__cause__, AssertionError)
    with pytest.raises(SystemExit), EndRequests():  # no failure
        pressing()
        raise SystemExit
    with pytest.raises(AssertionError), EndRequests():
        pressing()
        with pytest.raises(Interrupted):  # repeated, and dealt with, as by `chat`
            time.sleep(100)
        raise AssertionError
    with EndRequests():
        pressing()
    time.sleep(0.1)  # a command that has ended is not interrupted
    assert capsys.readouterr().err == ""


def test_other_errors_of_a_finalizer_are_told_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        def __del__(self) -> None:
            raise ValueError("wrong")

    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: told.append(str(lost.exc_value)))
    with EndRequests():
        Wrong()
    assert told == ["wrong"]


def _handling() -> list[Any]:
    """Return what handles signals, and which descriptor is written to at one."""
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    return [descriptor, *(signal.getsignal(number) for number in SIGNALS)]


@pytest.mark.parametrize("requests", [EndRequests, lambda: Interrupts(Answers())], ids=["command", "run"])
def test_where_no_thread_may_start_signals_stay_as_they_were(requests: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = _handling()
    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="can't start"), requests():
        pass
    assert _handling() == before


@pytest.mark.parametrize("requests", [EndRequests, lambda: Interrupts(Answers())], ids=["command", "run"])
def test_where_every_signal_is_ignored_the_wake_up_descriptor_is_left_as_it_was(requests: Any) -> None:
    usual = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        before = _handling()
        with requests():
            assert _handling()[1:] == before[1:]
        assert _handling() == before
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


STUCK_COMMAND = """
import ctypes, os, signal, threading, time
from wgrad.train.terminal import end_requests
end_requests.GRACE = 0.3
reader, writer = os.pipe()
masked = threading.Event()
def press():
    masked.wait()
    os.kill(os.getpid(), signal.SIGTERM)
with end_requests.EndRequests():
    threading.Thread(target=press, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the other thread takes it
    masked.set()
    ctypes.CDLL(None).read(reader, ctypes.create_string_buffer(1), 1)
"""


@posix
def test_sigterm_ends_a_command_that_a_driver_does_not_give_back() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK_COMMAND], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (143, "wgrad: interrupted\n")


# ---- a run -------------------------------------------------------------------------------------
STEPS = 12


def options_for(folder: Path, out: Path) -> list[str]:
    return few_steps(folder, out, STEPS, save_steps=5)


@pytest.fixture
def tiny(whole_run: Any) -> Path:
    """Return the folder of `whole_run`."""
    folder: Path = whole_run(options_for)
    return folder


def resumes_to_the_same_bits(tiny: Path, out: Path) -> None:
    """Resume a run and check that its result is that of the undisturbed one."""
    assert main([*options_for(tiny, out), "--resume"]) == 0
    name = "adapter_model.safetensors"
    assert (out / name).read_bytes() == (tiny / "whole" / name).read_bytes()
    results = [json.loads((o / "results.json").read_text()) for o in (out, tiny / "whole")]
    for key in ("held_out_loss_before", "held_out_loss_after", "sample_after", "steps"):
        assert results[0][key] == results[1][key], key


@posix
@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_run_saves_and_says_by_which_signal_it_ended(
    name: str, status: int, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from wgrad.train.step.trainer import Trainer

    step = Trainer.step

    def pressed(self: Any, item: Any, lr: float) -> None:
        if item.index == 6:
            press(getattr(signal, name))
        step(self, item, lr)

    monkeypatch.setattr(Trainer, "step", pressed)
    out = tiny / "out"
    assert main(options_for(tiny, out)) == status
    monkeypatch.undo()
    message = f"wgrad: interrupted after step 7 of {STEPS}, which is saved; go on with --resume\n"
    assert capsys.readouterr().err == message
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-5", "step-7"]
    resumes_to_the_same_bits(tiny, out)


def test_pressed_twice_while_a_checkpoint_is_written(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from wgrad.train.run import whole_run

    save = whole_run.save_session_adapter

    def pressed(*given: Any) -> None:
        press()
        press()
        save(*given)

    monkeypatch.setattr(whole_run, "save_session_adapter", pressed)
    out = tiny / "out"
    assert main(options_for(tiny, out)) == 130
    monkeypatch.undo()
    assert "interrupted after step 5" in capsys.readouterr().err
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["step-5"]
    resumes_to_the_same_bits(tiny, out)


def test_pressed_in_the_last_step_the_result_is_written(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from wgrad.train.step.trainer import Trainer

    step = Trainer.step

    def pressed(self: Any, item: Any, lr: float) -> None:
        step(self, item, lr)
        if item.index == STEPS - 1:
            press()

    monkeypatch.setattr(Trainer, "step", pressed)
    out = tiny / "out"
    assert main(options_for(tiny, out)) == 130
    monkeypatch.undo()
    assert "interrupted after the last step: what was trained is in" in capsys.readouterr().err
    assert (out / "adapter_model.safetensors").exists() and (out / "checkpoints" / f"step-{STEPS}").is_dir()
    resumes_to_the_same_bits(tiny, out)


@posix
def test_ctrl_c_meets_the_reader_of_the_pipe_as_well(tiny: Path) -> None:
    """`wgrad finetune ... | tee log`: the terminal sends the signal to both, and the reader is gone first."""
    out = tiny / "out"
    command = [sys.executable, "-m", "wgrad.train", *options_for(tiny, out), "--max-steps", "4000"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None and run.stderr is not None
    while run.poll() is None and not list(out.glob("checkpoints/step-*[0-9]")):
        time.sleep(0.01)
    run.stdout.close()
    run.send_signal(signal.SIGINT)
    errors = run.stderr.read()
    assert run.wait() == 130, errors
    saved = max(int(p.name[5:]) for p in out.glob("checkpoints/step-*[0-9]"))
    assert errors == f"wgrad: interrupted after step {saved} of 4000, which is saved; go on with --resume\n"
    run.stderr.close()
