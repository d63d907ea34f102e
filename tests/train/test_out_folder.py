"""One run at a time in a folder; whoever has it is named; who is dead has it no more."""

from __future__ import annotations

import errno
import json
import os
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
from wgrad.train.ranks.world import World
from wgrad.train.run.out_folder import HOLDER_FILE, LOCK_FILE, OutFolder
from wgrad.train.run.outlets import Outlets

PIPE = pytest.param("pipe", marks=pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here"))


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("kind", ["link", PIPE])
def test_a_ranks_log_is_a_file_of_its_own(kind: str, tmp_path: Path) -> None:
    """What lies in the place of OUT/ranks/rank-1.log is neither followed nor waited for."""
    (tmp_path / "mine").write_text("mine")
    log = tmp_path / "out" / "ranks" / "rank-0.log"
    log.parent.mkdir(parents=True)
    log.symlink_to(tmp_path / "mine") if kind == "link" else os.mkfifo(log)
    outlets = Outlets(str(tmp_path / "out"), World())
    with pytest.raises(WgradError, match=r"cannot write .*rank-0\.log"):
        outlets._log()
    assert (tmp_path / "mine").read_text() == "mine"
    log.unlink()
    outlets._log().print("x")
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
def test_a_file_system_without_locks(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        text = f"finetune --model {model} --data {text_data} --out {out} --device cpu --rank 2 --seq-len 24"
        return f"{text} --max-steps 6 --save-every 1 --log-every 1 --accumulate 1".split()

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
