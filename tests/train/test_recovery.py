"""A run whose device is lost goes on in the same process, to the same bits."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.train import conftest
from tests.train.lossy_device import Front, LossyDevice
from wgrad.device.errors import DeviceLost, NeedsNewProcess
from wgrad.train.commands.cli import main
from wgrad.train.model.adapter_files import WEIGHTS_FILE
from wgrad.train.run import kept_state, recovery, session
from wgrad.train.run.recovery import MOST
from wgrad.train.step.trainer import Trainer

STEPS = 8
TIMES = ("tokens_per_second", "memory_bytes", "seconds", "peak_bytes")


class Runs:
    """Runs of a small model, each on a device behind a front. whole: one that nothing happens to."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        sizes: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
        config = conftest.tiny_config(hidden_size=16, intermediate_size=24, num_hidden_layers=1, **sizes)
        self.model = conftest.write_checkpoint(folder / "model", config, conftest.random_weights(config))
        self.data = folder / "data.jsonl"
        self.data.write_text("".join(json.dumps({"text": text}) + "\n" for text in conftest.SENTENCES * 4))

    def run(
        self,
        monkeypatch: pytest.MonkeyPatch,
        gaps: Iterable[int] = (),
        *more: str,
        device: str = "",
        command: Callable[[list[str]], int] = main,
        reopens: bool = True,
    ) -> tuple[int, Path, Front]:
        """device: in place of the one behind a front."""
        self.count += "--resume" not in more
        out, front = self.folder / f"out-{self.count}", Front(gaps, reopens)
        if not device:
            monkeypatch.setattr(session, "select_device", lambda *_: front.device())
        values = {"--model": self.model, "--data": self.data, "--out": out, "--max-steps": STEPS, "--save-steps": 3}
        values |= {"--eval-steps": 4, "--lora-r": 2, "--max-length": 32, "--lora-dropout": 0.1, "--logging-steps": 2}
        values |= {"--device": device or "cpu"}
        status = command(["finetune", *(str(part) for pair in values.items() for part in pair), *more])
        return status, out, front


class _Started(BaseException):
    """This process was replaced by another one."""


def as_program(monkeypatch: pytest.MonkeyPatch, before: Callable[[], None], words: list[str]) -> int:
    """Run a command as the program `wgrad`, here. before: called before it is started again in a new process."""
    started: list[list[str]] = []

    def execv(path: str, command: list[str]) -> None:
        assert command[:3] == [sys.executable, "-m", "wgrad"] == [path, *command[1:3]]
        started.append(command[3:])
        raise _Started

    with monkeypatch.context() as patch:
        patch.setattr(os, "execv", execv)
        while True:
            patch.setattr(sys, "argv", ["wgrad", *words])
            try:
                return main()
            except _Started:
                before()
                words = started.pop()


def contents(out: Path) -> dict[str, Any]:
    """Return the files that a run leaves, without times."""

    def plain(text: str) -> dict[str, Any]:
        return {name: value for name, value in json.loads(text).items() if name not in TIMES}

    found: dict[str, Any] = {"adapter": (out / WEIGHTS_FILE).read_bytes()}
    for name in ("metrics.jsonl", "samples.jsonl"):
        found[name] = [plain(line) for line in (out / name).read_text().splitlines()]
    return found | {"results": plain((out / "results.json").read_text())}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("recovery"))


@pytest.fixture(scope="module")
def whole(runs: Runs) -> tuple[dict[str, Any], int]:
    with pytest.MonkeyPatch.context() as patch:
        status, out, front = runs.run(patch)
    assert status == 0 and not front.losses
    return contents(out), front.calls


def test_lost_anywhere_it_ends_with_the_same_bits(
    runs: Runs, whole: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """While weights are loaded, in steps, measures, samples and checkpoints; once, and again and again."""
    expected, calls = whole
    monkeypatch.setattr(kept_state, "_SECONDS", 0.0)
    for gaps in ([calls // 9, calls // 5, calls // 2, calls // 3], [calls - 20]):
        capsys.readouterr()
        status, out, front = runs.run(monkeypatch, gaps)
        said = capsys.readouterr().out
        assert status == 0, said
        assert front.losses.total() == len(gaps) == said.count("note: the device was lost while doing")
        assert contents(out) == expected
        assert front.shares == list(range(1, len(gaps) + 1))


def test_a_step_that_loses_the_device_three_times_ends_the_run(
    runs: Runs, whole: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """With a report; what was done up to there is saved, and --resume ends with the same bits."""
    expected, _ = whole
    plain = Trainer.step

    def step(self: Any, step: Any, lr: float) -> None:
        if step.index == 4:
            self.device.lost = True
            raise DeviceLost("the device was lost while submitting commands (launches in flight: gemm)")
        plain(self, step, lr)

    monkeypatch.setattr(kept_state, "_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        status, out, front = runs.run(monkeypatch)
    assert status == 2 and front.shares == [1, 2]
    said = capsys.readouterr().err
    assert said.startswith(
        "wgrad: error: the device was lost 3 times at step 5: the device was lost while submitting commands "
        "(launches in flight: gemm). Try a smaller --max-length, another driver or another --device; --resume goes on "
    )
    assert runs.run(monkeypatch, (), "--resume")[0] == 0
    assert contents(out) == expected


def test_a_device_that_does_not_open_again_ends_the_run(
    runs: Runs, whole: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The error tells from where --resume goes on, which ends with the same bits."""
    expected, calls = whole
    monkeypatch.setattr(kept_state, "_SECONDS", 0.0)

    def reopen(device: Any, losses: int) -> Any:
        raise DeviceLost("a card was lost, and does not open again: its driver hangs")

    with monkeypatch.context() as patch:
        patch.setattr(LossyDevice, "reopen", reopen)
        assert runs.run(monkeypatch, [calls // 30])[0] == 2
        assert capsys.readouterr().err.endswith(": its driver hangs; no checkpoint was saved\n")
        status, out, _ = runs.run(monkeypatch, [calls // 2])
    said = capsys.readouterr().err
    assert status == 2 and "Traceback" not in said
    wanted = "wgrad: error: a card was lost, and does not open again: its driver hangs; --resume goes on after step "
    assert said.startswith(wanted)
    assert runs.run(monkeypatch, (), "--resume")[0] == 0
    assert f"step-{int(said.removeprefix(wanted))}\n" in capsys.readouterr().out
    assert contents(out) == expected


@pytest.mark.skipif(os.name != "posix", reason="a process is replaced by another")
def test_a_device_that_needs_a_new_process_gets_one(
    runs: Runs, whole: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The command is started again with --resume, from the newest state, and ends with the same bits. Not for ever."""
    expected, calls = whole
    monkeypatch.setattr(kept_state, "_SECONDS", 0.0)
    monkeypatch.setattr(recovery, "_PAUSE", 0.0)
    program = partial(as_program, monkeypatch, lambda: None)
    with monkeypatch.context() as patch:
        patch.setenv("WGRAD_LOST_AT", "")
        status, out, front = runs.run(patch, [calls // 2, calls // 3], command=program, reopens=False)
        said = capsys.readouterr()
        assert status == 0 and front.losses.total() == 2, said.err
        assert said.err.count("as planned; --resume goes on after step ") == said.err.count(": starting again\n") == 2
        assert contents(out) == expected
        patch.setenv("WGRAD_LOST_AT", "")
        status, out, front = runs.run(patch, [calls // 30] * 9, command=program, reopens=False)
        assert status == 2 and front.losses.total() == MOST
        assert "the device was lost 3 times at step 0: " in capsys.readouterr().err
        # Inside of another program nothing is started.
        assert runs.run(patch, [calls // 2], reopens=False)[0] == NeedsNewProcess.status


def test_a_state_that_is_too_large_for_main_memory_is_that_of_the_last_checkpoint(
    runs: Runs, whole: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    expected, calls = whole
    monkeypatch.setattr(kept_state, "main_memory", lambda: 1 << 10)
    monkeypatch.setattr(kept_state, "_SECONDS", 0.0)
    status, out, front = runs.run(monkeypatch, [calls // 3, calls * 2 // 3])
    assert status == 0 and front.losses.total() == 2
    assert contents(out) == expected
    resumed = re.findall(r"resuming from .*step-(\d+)", capsys.readouterr().out)
    assert set(resumed) <= {"3", "6"}


def test_a_state_is_kept_as_often_as_it_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most each 10 s and 1 % of the time; after a loss 10 % of it. Only once the records up to it are written."""
    now, finite = [0.0], [True]

    class Copy:
        def ready(self) -> bool:
            return True

        def result(self) -> dict[str, np.ndarray]:
            now[0] += 0.25
            return {"parameters": np.array([0.0 if finite[0] else np.nan], np.float32)}

    optimizer: Any = SimpleNamespace(
        state_bytes=1,
        state_readback=lambda: now.__setitem__(0, now[0] + 0.05) or Copy(),
    )
    made = partial(kept_state.KeptState, optimizer, dict, lambda: now[0])
    for lost, least, pause in ((False, 10.0, 25.0), (True, 0.0, 2.5)):
        now[0] = 0.0
        kept = made(lost=lost, reopens=True)
        assert kept.due == (least == 0)
        now[0] = least
        assert kept.due
        kept.begin(3)
        assert not kept.due
        kept.look(2)
        assert kept.state is None
        kept.look(3)
        assert kept.state is not None and kept.state.step == 3
        now[0] += pause - 0.01
        assert not kept.due
        now[0] += 0.02
        assert kept.due
        finite[0] = False
        kept.begin(4)
        kept.look(4)
        assert kept.state.step == 3
        finite[0] = True
    assert not made(lost=True, reopens=False).due
