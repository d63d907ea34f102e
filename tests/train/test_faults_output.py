"""Runs whose output is closed, full or lacks a character at any line: they continue and give the same bits."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import few_steps
from wgrad.train.commands.cli import main
from wgrad.train.run.evaluation import Evaluation

pytestmark = pytest.mark.usefixtures("short_samples")

RESULT = ("adapter_model.safetensors", "adapter_config.json", "loss.svg")


def options_for(folder: Path, out: Path) -> list[str]:
    return few_steps(folder, out, steps=4, save_steps=2)


class Output(io.StringIO):
    """A stream that takes `lines` writes and then fails with the error `number`."""

    def __init__(self, lines: int, number: int) -> None:
        super().__init__()
        self.left, self.number = lines, number

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError(self.number, os.strerror(self.number))
        return super().write(text)

    def flush(self) -> None:
        if self.left < 0:
            raise OSError(self.number, os.strerror(self.number))


@pytest.fixture
def tiny(whole_run: Any) -> Path:
    """Return the folder of `whole_run`."""
    folder: Path = whole_run(options_for)
    return folder


def same(out: Path, whole: Path) -> None:
    """Check that two runs have the same result and the same checkpoints."""
    for name in RESULT:
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    results = [json.loads((o / "results.json").read_text()) for o in (out, whole)]
    for key in ("held_out_loss_before", "held_out_loss_after", "sample_before", "sample_after", "steps"):
        assert results[0][key] == results[1][key], key
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-2", "step-4"]


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC], ids=["closed", "full"])
def test_a_run_outlives_output_that_ends_at_any_line(number: int, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Output(1000, number)
    monkeypatch.setattr(sys, "stdout", counted)
    assert main(options_for(tiny, tiny / "counted")) == 0
    writes = 1000 - counted.left
    assert writes > 10
    # Each line with one of the two errors: only the place of a failure matters, not its kind.
    for line in range(number == errno.ENOSPC, writes, 2 if number == errno.EPIPE else 3):
        monkeypatch.setattr(sys, "stdout", Output(line, number))
        monkeypatch.setattr(sys, "stderr", Output(0, number))
        assert main(options_for(tiny, tiny / "out")) == 0
        same(tiny / "out", tiny / "whole")
        shutil.rmtree(tiny / "out")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_samples_are_escaped_where_the_encoding_lacks_them(
    encoding: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    words = [*options_for(tiny, tiny / "out"), "--sample-prompt", "a journey → été"]
    assert main(words) == 0
    assert "a journey \\u2192" in raw.getvalue().decode(encoding)
    for name in RESULT:
        assert (tiny / "out" / name).read_bytes() == (tiny / "whole" / name).read_bytes(), name


def test_a_run_without_output_is_the_same(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that was started with both descriptors closed."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(options_for(tiny, tiny / "out")) == 0
    same(tiny / "out", tiny / "whole")


def test_the_result_is_there_before_the_last_evaluation(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process ends in the last evaluation or sample, adapter and last checkpoint are written before."""

    measure = Evaluation.measure

    def fail(evaluation: Evaluation, step: int, when: str, *more: Any) -> Any:
        if when == "after":
            raise RuntimeError("the machine falls down the stairs")
        return measure(evaluation, step, when, *more)

    monkeypatch.setattr(Evaluation, "measure", fail)
    with pytest.raises(RuntimeError):
        main(options_for(tiny, tiny / "out"))
    monkeypatch.undo()
    name = "adapter_model.safetensors"
    assert (tiny / "out" / name).read_bytes() == (tiny / "whole" / name).read_bytes()
    assert (tiny / "out" / "checkpoints" / "step-4").is_dir() and not (tiny / "out" / "results.json").exists()
    assert main([*options_for(tiny, tiny / "out"), "--resume"]) == 0
    assert (tiny / "out" / name).read_bytes() == (tiny / "whole" / name).read_bytes()


def test_what_is_saved_is_saved_before_it_is_said(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that is not read blocks a print: at each line, the files on the disk are ahead of it."""
    out, seen = tiny / "out", []
    monkeypatch.setattr("wgrad.train.terminal.progress.LINE_SECONDS", 0.0)

    class Watching(io.StringIO):
        def write(self, text: str) -> int:
            if text.startswith("step "):
                step = int(text.split()[1].partition("/")[0])
                saved = [int(p.name[5:]) for p in out.glob("checkpoints/step-*") if p.name[5:].isdigit()]
                seen.append((step, max(saved, default=0)))
            if text.startswith("held-out loss after"):
                seen.append((99, 4 if (out / "adapter_model.safetensors").exists() else 0))
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", Watching())
    assert main(options_for(tiny, out)) == 0
    assert seen == [(1, 0), (2, 2), (3, 2), (4, 4), (99, 4)]


# ---- generate ----------------------------------------------------------------------------------
def generate(tiny: Path) -> int:
    words = ["--prompt", "a journey → été", "--device", "cpu", "--max-new-tokens", "8", "--temperature", "0"]
    return main(["generate", "--model", str(tiny / "model"), *words])


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        (errno.EPIPE, 1, ""),
        (errno.ENOSPC, 2, f"wgrad: error: cannot write to standard output: {os.strerror(errno.ENOSPC)}\n"),
    ],
    ids=["closed", "full"],
)
def test_generation_ends_when_nobody_takes_its_text(
    number: int, status: int, said: str, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The text is the purpose of `generate`: it ends, and says why if anybody may read that."""
    for lines in range(4):
        monkeypatch.setattr(sys, "stdout", Output(lines, number))
        assert generate(tiny) == status
        errors = capsys.readouterr().err.splitlines(keepends=True)
        assert [line.split(":")[0] for line in errors[:2]] == ["device", "compute"] and "".join(errors[2:]) == said


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_text_beyond_the_encoding_is_escaped(
    encoding: str, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    assert generate(tiny) == 0
    assert raw.getvalue().decode(encoding).startswith("a journey \\u2192 ")


def test_without_standard_error_the_text_is_still_only_the_text(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert generate(tiny) == 0
    assert capsys.readouterr().out.startswith("a journey")


def test_ctrl_c_ends_the_line(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def stop(*args: Any) -> Any:
        yield 40
        raise KeyboardInterrupt

    monkeypatch.setattr("wgrad.train.commands.generate.text_ids", stop)
    assert generate(tiny) == 130
    captured = capsys.readouterr()
    assert captured.out.endswith("\n") and captured.err.endswith("wgrad: interrupted\n")
