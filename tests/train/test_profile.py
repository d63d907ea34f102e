"""--profile: what a run asks of its device, and what it says at the end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wgrad.autograd.reference import ReferenceDevice
from wgrad.train.commands.cli import main
from wgrad.train.run.result import say_done, start_profile


class Timed:
    """A device with kernels to time."""

    description = "a card"

    def __init__(self) -> None:
        self.timed = False

    def profile(self, on: bool = True) -> bool:
        self.timed = on
        return True

    def profile_table(self) -> str:
        return "the table" if self.timed else ""

    def memory(self) -> Any:
        return SimpleNamespace(peak_bytes=0)


def session(device: Any, profile: bool) -> tuple[Any, list[str]]:
    said: list[str] = []
    config = SimpleNamespace(profile=profile, full=False)
    return SimpleNamespace(device=device, config=config, say=said.append, out="out"), said


@pytest.mark.parametrize("profile", [True, False])
def test_the_table_is_the_last_line_where_it_was_asked_for(profile: bool) -> None:
    run, said = session(Timed(), profile)
    start_profile(run)
    say_done(run, {"seconds": 1.0}, 0, None)
    assert run.device.timed == profile and said[0].startswith("done in")
    assert said[1:] == (["the table"] if profile else [])


def test_the_table_is_a_file_too(
    make_checkpoint: Any, text_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written before results.json, which says that all is there."""
    make_checkpoint()
    for name in ("timed", "untimed"):
        monkeypatch.setattr(ReferenceDevice, "profile_table", lambda self, text=name: "table" * (text == "timed"))
        options = (
            f"--model {tmp_path / 'model'} --data {text_data} --out {tmp_path / name} --max-steps 1 --max-length 24"
        )
        assert main(["finetune", "--device", "cpu", "--no-sample", *options.split()]) == 0
    timed = tmp_path / "timed" / "profile.txt"
    assert timed.read_text() == "table\n" and not (tmp_path / "untimed" / "profile.txt").exists()
    assert timed.stat().st_mtime_ns <= (timed.parent / "results.json").stat().st_mtime_ns


def test_a_device_without_kernels_says_so() -> None:
    run, said = session(ReferenceDevice(), True)
    start_profile(run)
    say_done(run, {"seconds": 1.0}, 0, None)
    assert (
        said[0] == f"note: --profile has no effect: {run.device.description} has no kernels to time" and len(said) == 2
    )
