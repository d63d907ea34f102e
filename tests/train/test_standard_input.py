"""`--data -`: a run from a pipe is that from a file, is resumed from its copy, and shared by ranks."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.train.ranks_runs import ENVIRONMENT, LIMIT, command_of, needs_mpi, start, words
from wgrad.device.files import TEMPORARY
from wgrad.train.commands.cli import main
from wgrad.train.data import standard_input
from wgrad.train.data.standard_input import copied_files, copies

OPTIONS = {
    "--device": "cpu",
    "--lora-r": 2,
    "--max-length": 24,
    "--gradient-accumulation-steps": 2,
    "--save-steps": 1,
    "--no-sample": True,
}


class Input(io.TextIOWrapper):
    """Standard input with this content; None: a terminal."""

    def __init__(self, content: bytes | None) -> None:
        super().__init__(io.BufferedReader(io.BytesIO(content or b"")))  # type: ignore[arg-type]
        self.terminal = content is None

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def model(make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return make_checkpoint(hidden_size=16, intermediate_size=24, num_hidden_layers=1)


@pytest.fixture
def finetune(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return finetune(standard input, name of --out, more words), which gives the status."""

    def run(content: bytes | None, out: str, *more: str) -> int:
        monkeypatch.setattr(sys, "stdin", Input(content))
        return main(["finetune", *words({"--model": model, "--out": tmp_path / out, **OPTIONS}), *more])

    return run


def adapter(out: Path) -> bytes:
    return (out / "adapter_model.safetensors").read_bytes()


def test_a_run_and_its_resumption(
    finetune: Callable[..., int], text_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = text_data.read_bytes()
    assert finetune(None, "file", "--data", str(text_data), "--max-steps", "3") == 0
    assert finetune(content, "pipe", "--data", "-", "--max-steps", "2") == 0
    (copy,) = copied_files()
    assert copy.read_bytes() == content and copy.stat().st_mode & 0o077 == 0 and [*copies().iterdir()] == [copy]
    assert f"standard input: copied to {copy}, for --resume" in capsys.readouterr().out
    assert finetune(None, "pipe", "--resume", "--max-steps", "3") == 0
    assert f"standard input: what the run was begun with, of which {copy} is a copy" in capsys.readouterr().out
    assert adapter(tmp_path / "pipe") == adapter(tmp_path / "file")
    # Without the copy it must be given again, and be the same.
    assert main(["cache", "clear"]) == 0 and not copied_files()
    assert finetune(None, "pipe", "--resume", "--max-steps", "4") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"--data: the copy of standard input that the run was begun with, {copy}, is gone: give the same" in error
    assert finetune(content + b'{"text": "other"}\n', "pipe", "--resume", "--max-steps", "4") == 2
    assert "--data: standard input is not what the run in" in capsys.readouterr().err.splitlines()[-1]
    assert finetune(content, "pipe", "--resume", "--max-steps", "4") == 0 and copied_files() == [copy]


def test_folders_and_temporary_files_are_no_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standard_input, "copies", lambda: tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("b", "a", "c" + TEMPORARY):
        (tmp_path / name).touch()
    assert copied_files() == [tmp_path / "a", tmp_path / "b"]


def test_held_out_parquet_is_read_from_standard_input(
    finetune: Callable[..., int], text_data: Path, capsys: Any
) -> None:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    table = io.BytesIO()
    parquet.write_table(arrow.table({"text": ["better late than never"] * 4}), table)
    given = ["--data", str(text_data), "--eval-data", "-", "--max-steps", "1"]
    assert finetune(table.getvalue(), "out", *given) == 0
    assert "standard input is taken for Parquet, each row an example" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, ["--data", "-"], "--data: standard input is no file: give its data with '< FILE' or a pipe"),
        (b"", ["--data", "-"], "--data: standard input is empty: give a file with at least one example"),
        (b"\x00\x01", ["--data", "-"], "--data: standard input has NUL bytes"),
        (b"x", ["--data", "-", "--eval-data", "-"], "--eval-data: standard input is --data already: give a file"),
    ],
)
def test_standard_input_without_data_is_refused(
    content: bytes | None, options: list[str], message: str, finetune: Callable[..., int], capsys: Any
) -> None:
    assert finetune(content, "out", *options) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not list(copies().glob("*.partial")) and (content or not copied_files())


@needs_mpi
def test_ranks_share_what_was_copied_before_they_began(model: Path, text_data: Path, tmp_path: Path) -> None:
    values = {"--model": model, "--data": "-", "--out": tmp_path / "out", "--max-steps": 1, "--ranks": 2, **OPTIONS}
    environment = ENVIRONMENT | {"XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
    command = [sys.executable, "-m", "wgrad", "finetune", *words(values)]
    more: dict[str, Any] = {"capture_output": True, "text": True, "timeout": LIMIT, "env": environment}
    done = subprocess.run(command, input=text_data.read_text(), **more)
    assert done.returncode == 0, done.stderr
    assert len(copied_files()) == 1 and json.loads((tmp_path / "out" / "results.json").read_text())["steps"] == 1
    other = {name: value for name, value in values.items() if name != "--ranks"} | {"--out": tmp_path / "other"}
    done = start(command_of(2, other))
    line = "wgrad: error: --data: standard input reaches no run of several processes that mpirun or srun started"
    assert done.returncode == 2 and done.stderr.count(line) == 1 and "Traceback" not in done.stderr
