"""Why a command ends: refusals of the system, which no fault of wgrad brings about."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

from wgrad.device.errors import WgradError
from wgrad.train.commands.cli import main
from wgrad.train.data import template_process
from wgrad.train.terminal.ending import ending_of
from wgrad.train.terminal.output import OutputLost


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(errno.EACCES, "", "a/b"), "a/b: permission denied"),
        (OSError(errno.ENAMETOOLONG, "", b"a\xff"), "a\\udcff: the path is too long"),
        (OSError(errno.ENOSPC, "", "a\n\x1bb"), "a \\x1bb: the disk is full"),
        (OSError(errno.EMFILE, "", "a"), "too many open files: raise the limit (ulimit -n)"),
        (BlockingIOError(errno.EAGAIN, ""), "too many processes"),
        (OSError(errno.EROFS, "", 3), "the file system is read-only"),
        (OSError(errno.ENFILE, "", "a"), "too many open files on this machine: end other programs"),
        (OSError(errno.ENOMEM, "", "a"), "a: out of main memory"),
        (PermissionError(errno.EPERM, "", Path("a")), "a: permission denied"),
        (OSError(errno.EDQUOT, "", "a"), "a: your disk quota is used up"),
        (OSError(errno.EFBIG, "", "a"), "a: larger than the file system or the limit (ulimit -f) allows"),
        (OSError(errno.EIO, "", "a"), "a: the disk cannot read or write it"),
        (OSError(errno.ELOOP, "", "a"), "a: the path has symbolic links without an end"),
        (RuntimeError("can't start new thread"), "the system starts no further thread"),
        (FileNotFoundError(errno.ENOENT, ""), "the working folder has been removed"),
    ],
)
def test_a_refusal_of_the_system_is_one_line(error: BaseException, words: str) -> None:
    ending = ending_of(error)
    assert ending is not None and ending[1] == 2 and ending[0].startswith(words) and "\n" not in ending[0]


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "", "a"),
        OSError(errno.EBADF, ""),
        IsADirectoryError(errno.EISDIR, "", "a"),
        RuntimeError("other"),
        OutputLost(errno.ENOSPC, ""),  # `main` says that it is standard output
    ],
)
def test_other_errors_are_faults(error: BaseException) -> None:
    assert ending_of(error) is None


def test_a_working_folder_that_is_gone_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    os.chdir("gone")
    os.rmdir(tmp_path / "gone")
    assert main(["serve", "--model", "m", "--adapter", "a"]) == 2
    assert capsys.readouterr().err == "wgrad: error: the working folder has been removed: change to another one\n"


def test_a_process_that_the_system_does_not_start_is_no_fault_of_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **named: object) -> NoReturn:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(WgradError, match="that runs chat templates and tokenizers does not start .*unavailable"):
        template_process.TemplateProcess().compile("{{ messages }}")
