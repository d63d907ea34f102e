"""Locks of output folders: one run at a time; errors name the run that has it; a dead process releases it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import pytest

from tests import own_process
from tests.own_process import needs_fork
from wgrad.device.errors import WgradError
from wgrad.train.commands.cli import main
from wgrad.train.output.checkpoints import Checkpoints
from wgrad.train.output.out_folder import HOLDER_FILE, LOCK_FILE, OutFolder
from wgrad.train.output.run_outputs import RunOutputs
from wgrad.train.ranks.world import World

PIPE = pytest.param("pipe", marks=pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here"))


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("kind", ["link", PIPE])
def test_a_ranks_log_is_a_file_of_its_own(kind: str, tmp_path: Path) -> None:
    """A link or FIFO at OUT/ranks/rank-1.log is neither followed nor waited for."""
    (tmp_path / "mine").write_text("mine")
    log = tmp_path / "out" / "ranks" / "rank-0.log"
    log.parent.mkdir(parents=True)
    log.symlink_to(tmp_path / "mine") if kind == "link" else os.mkfifo(log)
    outputs = RunOutputs(str(tmp_path / "out"), World())
    with pytest.raises(WgradError, match=r"cannot write .*rank-0\.log"):
        outputs._log()
    assert (tmp_path / "mine").read_text() == "mine"
    log.unlink()
    outputs._log().print("x")
    assert log.read_text() == "x\n"


def test_a_second_run_is_told_whose_the_folder_is(tmp_path: Path) -> None:
    out = tmp_path / "a" / "out"
    with OutFolder(out) as first:
        assert first.left_by is None
        with pytest.raises(WgradError) as caught, OutFolder(out):
            raise AssertionError("not reached")
        assert f"is in use by another run (process {os.getpid()} on {socket.gethostname()}, since 20" in str(
            caught.value
        )
        assert names(out) == [LOCK_FILE, HOLDER_FILE]  # the second has left it as it was
        (out / "x").write_text("")
    with OutFolder(out) as third:
        assert third.left_by is None
    assert names(out) == [LOCK_FILE, "x"]


def test_a_folder_into_which_nothing_came_goes_again(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), OutFolder(tmp_path / "a" / "b"):
        raise ZeroDivisionError
    assert names(tmp_path) == []
    (tmp_path / "mine").mkdir()
    with OutFolder(tmp_path / "mine"):
        pass
    assert (tmp_path / "mine").is_dir()


def enter_and_die(folder: Path) -> int:
    OutFolder(folder).__enter__()
    os._exit(9)


@needs_fork
def test_the_lock_of_a_killed_run_is_taken_over(tmp_path: Path) -> None:
    process = own_process.start(partial(enter_and_die, tmp_path), tmp_path.with_name("log"))
    process.join()
    assert process.exitcode == 9
    assert names(tmp_path) == [LOCK_FILE, HOLDER_FILE]
    with OutFolder(tmp_path) as folder:
        assert folder.left_by is not None and folder.left_by.startswith(f"process {process.pid} on ")
        assert json.loads((tmp_path / HOLDER_FILE).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("contents", [b"", b"{}", b"[" * 9999, b"\xff", b'{"pid": "x", "host": 1, "started": 2}'])
def test_a_damaged_note_is_no_hindrance(contents: bytes, tmp_path: Path) -> None:
    (tmp_path / HOLDER_FILE).write_bytes(contents)
    with OutFolder(tmp_path) as folder:
        assert folder.left_by is None
        (tmp_path / HOLDER_FILE).write_bytes(contents)
        with pytest.raises(WgradError, match="in use by another run .it does not say which"), OutFolder(tmp_path):
            raise AssertionError("not reached")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP])
def test_a_file_system_without_locks_still_keeps_runs_apart(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some network file systems: the file itself is the lock there."""

    def refuse(self: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(filelock.FileLock, "_acquire", refuse)
    with OutFolder(tmp_path / "out"):
        with pytest.raises(WgradError, match="is in use by another run"), OutFolder(tmp_path / "out"):
            raise AssertionError("not reached")
        (tmp_path / "out" / "x").write_text("")
    with OutFolder(tmp_path / "out"):
        pass


@needs_fork
def test_of_two_runs_at_once_one_is_refused_and_the_other_is_whole(
    make_checkpoint: Any, text_data: Path, tmp_path: Path, capsys: Any
) -> None:
    model = make_checkpoint(hidden_size=16, intermediate_size=24, num_hidden_layers=1)

    def options(out: Path) -> list[str]:
        text = f"finetune --model {model} --data {text_data} --out {out} --device cpu --lora-r 2 --max-length 24"
        return f"{text} --max-steps 6 --save-steps 1 --logging-steps 1 --gradient-accumulation-steps 1".split()

    assert main(options(tmp_path / "whole")) == 0
    work = partial(main, options(tmp_path / "out"))
    processes = [own_process.start(work, tmp_path / f"log-{i}") for i in range(3)]
    for process in processes:
        process.join()
    assert sorted(str(process.exitcode) for process in processes) == ["0", "2", "2"]
    name = "adapter_model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    capsys.readouterr()
    with OutFolder(tmp_path / "out"):
        assert main(options(tmp_path / "out")) == 2
        assert f"is in use by another run (process {os.getpid()} on " in capsys.readouterr().err


# ---- what somebody does to the folder while the run goes on ---------------------------------------
def remove(out: Path) -> None:
    shutil.rmtree(out)


def move(out: Path) -> None:
    out.rename(out.with_name("moved"))


def empty(out: Path) -> None:
    """rm -rf OUT/*"""
    for path in [p for p in out.iterdir() if not p.name.startswith(".")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def remake(out: Path) -> None:
    shutil.rmtree(out)
    out.mkdir()


def take_metrics(out: Path) -> None:
    (out / "metrics.jsonl").unlink()


def put_file(out: Path) -> None:
    shutil.rmtree(out)
    out.write_text("a file")


def put_other(out: Path) -> None:
    out.rename(out.with_name("moved"))
    out.mkdir()
    (out / "theirs").write_text("")


STEPS = 6


@pytest.fixture
def tiny(make_checkpoint: Any, text_data: Path, tmp_path: Path, capsys: Any) -> list[str]:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_hidden_layers": 1}
    make_checkpoint(hidden_size=16, intermediate_size=24, **sizes)
    text = (
        f"finetune --model {tmp_path / 'model'} --data {tmp_path / 'data.jsonl'} "
        f"--device cpu --lora-r 2 --max-length 24 "
        f"--max-steps {STEPS} --save-steps 2 --gradient-accumulation-steps 1"
    )
    return text.split()


def run_meddled(words: list[str], out: Path, meddle: Any, step: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """step: before which it is done; as many as there are: while the result is measured."""
    from wgrad.train.step.trainer import Trainer

    plain = Trainer.step

    def meddled(self: Any, item: Any, lr: float) -> None:
        if item.index == step:
            meddle(out)
        plain(self, item, lr)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", meddled)
        measure = Trainer.measure

        def measured(self: Any, *given: Any) -> Any:
            if step == STEPS and out.is_dir() and list(out.glob("adapter*")):
                meddle(out)
            return measure(self, *given)

        patch.setattr(Trainer, "measure", measured)
        return main([*words, "--out", str(out)])


@pytest.mark.skipif(os.name == "nt", reason="Windows removes no file that is open")
@pytest.mark.parametrize(
    ("meddle", "step", "said"),
    [
        (remove, 2, "was removed or moved during the run: it is written again, but checkpoints and other files from"),
        (remove, STEPS - 1, "was removed or moved during the run"),
        (remove, STEPS, "was removed or moved during the run"),
        (empty, STEPS, "has lost config.yaml, metrics.jsonl, samples.jsonl during the run: written again"),
        (remake, 3, "was removed or moved during the run"),
        (move, 2, "was removed or moved during the run"),
        (empty, 2, "has lost config.yaml, metrics.jsonl, samples.jsonl during the run: written again"),
        (take_metrics, 2, "has lost metrics.jsonl during the run: written again"),
    ],
)
def test_what_is_removed_of_the_folder_is_written_again(
    meddle: Any, step: int, said: str, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "out"
    assert run_meddled(tiny, out, meddle, step, monkeypatch) == 0
    printed = capsys.readouterr().out
    assert printed.count(said) == 1 and printed.count("during the run") == 1
    kept = {"adapter_config.json", "adapter_model.safetensors", "config.yaml", "results.json", "samples.jsonl"}
    assert kept | {"loss.svg", "metrics.jsonl", "checkpoints", LOCK_FILE} <= set(names(out))
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "loss" in r] == [*range(1, STEPS + 1)]
    assert Checkpoints(out).saved() == out / "checkpoints" / f"step-{STEPS}"


@pytest.mark.skipif(os.name == "nt", reason="Windows removes no file that is open")
def test_the_folder_that_is_made_again_is_locked(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    out = tmp_path / "out"
    plain = OutFolder.keep

    def keep(self: OutFolder) -> bool:
        again = plain(self)
        if again:
            with pytest.raises(WgradError, match="in use by another run") as caught, OutFolder(out):
                raise AssertionError("not reached")
            seen.append(str(caught.value))
        return again

    monkeypatch.setattr(OutFolder, "keep", keep)
    assert run_meddled(tiny, out, remove, 2, monkeypatch) == 0
    assert len(seen) == 1


@pytest.mark.skipif(os.name == "nt", reason="Windows removes no file that is open")
@pytest.mark.parametrize(
    ("meddle", "step", "said"),
    [
        (put_file, STEPS - 1, "a file of that name is in the way"),
        (put_other, 2, "is no longer the folder that the run began in"),
    ],
)
def test_nothing_is_written_into_what_is_not_the_runs(
    meddle: Any, step: int, said: str, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "out"
    assert run_meddled(tiny, out, meddle, step, monkeypatch) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    if out.is_dir():
        assert names(out) == ["theirs"]
