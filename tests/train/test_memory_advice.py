"""Running out of memory: the advice fits what was being done, and is one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.contract import Device
from wgrad.device.errors import OutOfMemory, WgradError
from wgrad.train.commands import cli
from wgrad.train.model.load_config import load_model_config
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.step import build
from wgrad.train.step.activations import estimate_activations
from wgrad.train.step.memory import advising, for_parameters, for_steps

RE_ROWS = re.compile(r"note: sequences have (\d+) tokens, in which all the data fits, not --max-length 1000000000\n")


class Small(ReferenceDevice):
    """A device that has no room for an array of `limit` elements or more."""

    reason = "made small"

    def __init__(self, limit: int, error: type[BaseException]) -> None:
        super().__init__()
        self.limit, self.error = limit, error

    def zeros(self, shape: Any, dtype: Any = np.float32) -> np.ndarray:
        if np.prod(shape) >= self.limit:
            raise self.error(f"no memory for {4 * int(np.prod(shape)):,} bytes")
        return super().zeros(shape, dtype)


def finetune(make_checkpoint: Any, data: Path, out: Path, *options: str) -> int:
    words = ["finetune", "--model", str(make_checkpoint()), "--data", str(data), "--out", str(out)]
    words += ["--max-length", "32"]
    return cli.main([*words, "--max-steps", "2", *options])


@pytest.mark.parametrize("error", [OutOfMemory, MemoryError], ids=lambda e: e.__module__ + "." + e.__name__)
@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["--lora-r", "40"], "use a --lora-r below 40, or fewer --target-modules"),
        (["--full"], "leave --full out to train an adapter, or use a smaller model"),
    ],
)
def test_parameters_that_do_not_fit_bring_advice_of_their_own(
    options: list[str], advice: str, error: Any, make_checkpoint: Any, text_data: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A rank that is too high is not mended by a smaller batch."""
    monkeypatch.setattr("wgrad.train.run.session.select_device", lambda spec, needs=None: Small(30_000, error))
    assert finetune(make_checkpoint, text_data, tmp_path / "out", *options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no memory for" in line and line.endswith(f": {advice}") and "batch" not in line
    assert not (tmp_path / "out").exists()


def test_a_start_that_main_memory_does_not_hold_brings_this_advice(
    make_checkpoint: Any, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "init_lora", Mock(side_effect=MemoryError("3 TiB")))
    folder = make_checkpoint()
    with pytest.raises(WgradError, match=r"^out of main memory \(3 TiB\): use a --lora-r below 40, or fewer"):
        build.build_trainable(RunOptions(max_length=8, lora_r=40), load_model_config(folder), folder, cpu, positions=8)


def test_a_step_out_of_memory_says_what_to_do(
    make_checkpoint: Any, text_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def step(*args: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("wgrad.train.step.trainer.Trainer.step", step)
    options = ("--device", "cpu", "--batch-size", "2", "--eval-fraction", "0")
    assert finetune(make_checkpoint, text_data, tmp_path / "out", *options) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith("out of main memory: use a smaller --batch-size or --max-length, or --gradient-checkpointing")


def test_rows_that_cannot_fit_are_refused_before_anything_is_loaded(
    make_checkpoint: Any, text_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    needed = estimate_activations(RunOptions(max_length=32), load_model_config(make_checkpoint()))
    for there, status in ((needed, 0), (needed - 1, 2), (needed // 4, 2)):
        monkeypatch.setattr("wgrad.train.run.build_session.main_memory", lambda there=there: there)
        out = tmp_path / str(there)
        assert (
            finetune(make_checkpoint, text_data, out, "--device", "cpu", "--gradient-accumulation-steps", "1") == status
        )
        said = capsys.readouterr()
        assert ("model: " in said.out) == (status == 0) == (out / "adapter_model.safetensors").exists()
        fit = 32 * there // needed
        words = (
            f"--max-length: activations of 1 x 32 tokens .* which about {fit} "
            f"tokens per sequence fit in: use a smaller --max-length"
        )
        assert status == 0 or re.search(words, said.err)


@pytest.mark.parametrize("packing", ["--packing", "--no-packing"])
def test_rows_are_no_longer_than_all_the_data(
    packing: str, make_checkpoint: Any, text_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row of a billion tokens is not made for a few hundred; and the numbers are those of the rows that are made."""
    lines = text_data.read_text().splitlines(keepends=True)
    text_data.write_text("".join(lines[:6]))
    adapters = []
    for seq_len in (10**9, None):
        row = RE_ROWS.search(capsys.readouterr().out)
        length = str(seq_len or (row and row[1]))
        out = tmp_path / length
        options = ["--device", "cpu", "--eval-fraction", "0.2", "--max-length", length, packing]
        assert finetune(make_checkpoint, text_data, out, *options) == 0
        adapters.append((out / "adapter_model.safetensors").read_bytes())
        assert f"max_length: {length}\n" in (out / "config.yaml").read_text()
    assert int(length) % 64 == 0
    assert 64 < int(length) <= 512 if packing == "--packing" else int(length) == 64  # all documents, or the longest
    assert adapters[0] == adapters[1] and not RE_ROWS.search(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("batch_size", "checkpointing", "advice"),
    [
        (4, False, "use a smaller --batch-size or --max-length, or --gradient-checkpointing"),
        (1, False, "use a smaller --max-length, or --gradient-checkpointing"),
        (1, True, "use a smaller --max-length"),
    ],
)
def test_advice_names_what_can_be_made_smaller(batch_size: int, checkpointing: bool, advice: str) -> None:
    assert for_steps(RunOptions(batch_size=batch_size), checkpointing) == advice


def test_a_large_adapter_gets_advice_of_its_own() -> None:
    assert for_parameters(RunOptions(adapter="a")) == "use a smaller --adapter, or a smaller model"


def test_the_inner_advice_stands_and_other_errors_pass() -> None:
    with pytest.raises(WgradError, match="^full: inner$"), advising("outer"), advising("inner"):
        raise OutOfMemory("full")
    with pytest.raises(KeyError), advising("outer"):
        raise KeyError
