"""--profile: what a run asks of its device, and what it says at the end."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wgrad.autograd.reference import ReferenceDevice
from wgrad.train.commands.cli import main
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.run.largest_costs import COSTS, largest_costs
from wgrad.train.run.result import say_done, start_profile


class Timed:
    """A device with kernels to time."""

    name = description = "a card"

    def __init__(self) -> None:
        self.timed = False

    def profile(self, on: bool = True) -> bool:
        self.timed = on
        return True

    def profile_table(self) -> str:
        return "the table" if self.timed else ""

    def profile_times(self) -> dict[str, float]:
        return {"gemm_matrix": 60.0, "attention": 30.0, "gemm_reduce": 10.0} if self.timed else {}

    def memory(self) -> Any:
        return SimpleNamespace(peak_bytes=0)


def session(device: Any, profile: bool) -> tuple[Any, list[str]]:
    said: list[str] = []
    config = RunOptions(profile=profile)
    sizes = SimpleNamespace(num_hidden_layers=4)
    mode = {"gradient_checkpointing": 2}
    parts = {"device": device, "config": config, "model_config": sizes, "mode": mode}
    return SimpleNamespace(**parts, say=said.append, out="out"), said


@pytest.mark.parametrize("profile", [True, False])
def test_the_table_is_the_last_line_where_it_was_asked_for(profile: bool) -> None:
    run, said = session(Timed(), profile)
    start_profile(run)
    say_done(run, {"seconds": 1.0}, 0, None)
    assert run.device.timed == profile and said[0].startswith("done in")
    assert said[1:2] == (["the table"] if profile else []) and len(said) == (4 if profile else 1)
    assert not profile or [line.partition(";")[0] for line in said[2:]] == ["70% matmuls", "30% attention"]
    assert not profile or "recompute fewer layers" in said[2]


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


def test_the_three_largest_costs_say_what_reduces_them(capsys: Any) -> None:
    """By options that exist; kernels of every file are known."""
    times = {"gemm_matrix": 4.0, "norm_rms": 3.0, "rope_split": 2.0, "optimizer_adamw": 1.5, "fill": 0.5}
    lines = largest_costs(times)
    assert [line.partition(";")[0] for line in lines] == [
        "45% passes over activations (norms, elementwise)",
        "36% matmuls",
        "14% optimizer",
    ]
    assert "to reduce: wgrad matrix-units enable" in largest_costs(times, "wgrad matrix-units enable")[1]
    assert largest_costs(times, recomputes=False)[0].endswith("to reduce: no option")
    assert main(["finetune", "--help-all"]) == 0
    known = capsys.readouterr().out
    advice = [largest_costs({kernel: 1.0})[0] for kernel in COSTS]
    assert {option for line in advice for option in re.findall("--[a-z-]+", line)} <= {*re.findall("--[a-z-]+", known)}
    step = [path.name for path in Path(__file__).parents[2].glob("wgsl/[aegnolr]*/*.wgsl") if ".inc." not in path.name]
    unknown = {name for name in step if "other kernels" in largest_costs({name: 1.0})[0]}
    assert {name.split("_")[0] for name in unknown} <= {"embedding.wgsl", "embedding", "roof.wgsl", "roof"} | {
        "cooperative",
        "fill.wgsl",
        "transfer.wgsl",
    }
