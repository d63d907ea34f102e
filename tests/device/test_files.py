"""Atomic files: the old one or the new one, whatever happens, and errors in one line."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from wgrad.device import files
from wgrad.device.errors import CannotWrite, WgradError
from wgrad.device.files import (
    atomic_file,
    atomic_folder,
    check_writable,
    make_folder,
    remove_leftovers,
    write_bytes,
    write_json,
    write_text,
    writing,
)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_file_is_replaced(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "old")
    write_text(tmp_path / "a", "nëw\r\n")
    assert (tmp_path / "a").read_bytes() == "nëw\r\n".encode()
    assert names(tmp_path) == ["a"]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_bytes(tmp_path / "a", b"old")
    with pytest.raises(RuntimeError), atomic_file(tmp_path / "a") as file:
        file.write(b"half")
        raise RuntimeError
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_text_mode_keeps_newlines(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "a", "w") as file:
        file.write("x\nü\n")
    assert (tmp_path / "a").read_bytes() == "x\nü\n".encode()


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    write_bytes(tmp_path / "a", b"old")
    code = (
        "import os, sys\nfrom wgrad.device.files import atomic_file\n"
        "with atomic_file(sys.argv[1]) as f:\n    f.write(b'half'); f.flush(); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")])
    assert done.returncode == 9
    assert (tmp_path / "a").read_bytes() == b"old"
    assert len(names(tmp_path)) == 2
    (tmp_path / "mine.partial").write_text("a user's file of a similar name")
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["a", "mine.partial"]


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "step-3"
    with pytest.raises(RuntimeError), atomic_folder(target) as folder:
        (folder / "x").write_text("half")
        raise RuntimeError
    assert names(tmp_path) == []
    with atomic_folder(target) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "x").write_text("whole")
        assert not target.exists()
    assert (target / "sub" / "x").read_text() == "whole"
    assert names(tmp_path) == ["step-3"]


def test_a_folder_in_the_way_is_an_error(tmp_path: Path) -> None:
    target = make_folder(tmp_path / "step-3")
    (target / "x").write_text("other")
    with pytest.raises(WgradError, match="cannot write .*step-3"), atomic_folder(target) as folder:
        (folder / "x").write_text("new")
    assert (target / "x").read_text() == "other"
    assert names(tmp_path) == ["step-3"]


def test_an_error_names_the_place_that_a_file_was_meant_for(tmp_path: Path) -> None:
    """Nobody finds the folder that it was written in: that is gone."""
    target = tmp_path / "a.12.partial" / "step-3"
    with pytest.raises(CannotWrite) as caught, atomic_folder(target) as folder, atomic_file(folder / "x") as file:
        file.write(b"y")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert str(caught.value).startswith(f"cannot write {target / 'x'}: the disk is full")
    assert names(target.parent) == []


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "disk is full"), (errno.EROFS, "read-only"), (errno.EDQUOT, "quota"), (errno.EIO, "/output error")],
)
def test_an_error_of_the_operating_system_is_one_line_of_advice(number: int, words: str) -> None:
    with pytest.raises(WgradError, match=f"cannot write a/b: .*{words}") as caught, writing("a/b"):
        raise OSError(number, os.strerror(number))
    assert "\n" not in str(caught.value) and "--out" in str(caught.value)


def test_dev_full_is_reported_as_a_full_disk(tmp_path: Path) -> None:
    """/dev/full takes no byte: the same error as a full disk, from the operating system itself."""
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full on this system")
    with pytest.raises(WgradError, match="cannot write .*: the disk is full"), writing(tmp_path):
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")
    with pytest.raises(WgradError, match="cannot write .*: the disk is full"), writing(tmp_path):
        with open("/dev/full", "wb", buffering=0) as file:
            np.zeros(9000).tofile(file)  # which says nothing of the disk


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_what_is_no_regular_file_keeps_its_place(tmp_path: Path) -> None:
    """os.replace would put a file in the place of /dev/null, where that is allowed."""
    os.mkfifo(tmp_path / "pipe")
    for write in (lambda p: write_text(p, "x", "--report"), lambda p: check_writable(p, "--report")):
        with pytest.raises(WgradError, match="pipe: it is no regular file: give another name with --report"):
            write(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo() and len(list(tmp_path.iterdir())) == 1


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(WgradError, match="cannot write .*a/b.*a file, not a folder"):
        make_folder(tmp_path / "a" / "b")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with a name on this system")
def test_a_small_file_is_read_and_nothing_without_an_end(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b" b\xff" + b"c" * 9 + b"\n")
    os.mkfifo(tmp_path / "pipe")
    assert files.read_small(tmp_path / "a") == "b\ufffd" + 9 * "c" and files.read_small(tmp_path / "a", 4) == "b\ufffdc"
    for other in (tmp_path / "pipe", "/dev/zero", tmp_path, tmp_path / "none", "a\0b", tmp_path / ("x" * 300)):
        assert files.read_small(other) == ""


def test_leftovers_that_cannot_be_looked_at_stay(tmp_path: Path) -> None:
    files.remove_leftovers(tmp_path / ("x" * 300))


def test_json_has_no_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert names(tmp_path) == []


def test_no_link_is_followed_by_what_is_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever guesses its name, and puts a link there, gets nothing overwritten."""
    (tmp_path / "other").write_bytes(b"mine")
    guessed = files._beside(tmp_path / "a")
    assert files._beside(tmp_path / "a") != guessed
    monkeypatch.setattr(files, "_beside", lambda target: guessed)
    for write in (lambda: write_bytes(tmp_path / "a", b"x"), lambda: check_writable(tmp_path / "a", "--out")):
        guessed.symlink_to(tmp_path / "other")
        with pytest.raises(WgradError, match="a file of that name is in the way"):
            write()
        guessed.unlink(missing_ok=True)
    guessed.symlink_to(tmp_path)
    with pytest.raises(WgradError, match="a file of that name is in the way"), atomic_folder(tmp_path / "a"):
        pass
    assert (tmp_path / "other").read_bytes() == b"mine"
