"""A device that declares to lack an operator: what needs it is refused there by name, or goes to the next device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wgrad
from tests.train.ranks_runs import words
from wgrad.autograd import select_device as dispatch
from wgrad.autograd.bind import bind
from wgrad.autograd.select_device import select_device
from wgrad.device.errors import DeviceUnavailable, OperatorMissing
from wgrad.device.implementations import Implementations
from wgrad.train.commands.cli import main
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.operators import implements


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch, wgpu_device: Any) -> Iterator[Any]:
    """without(operator): from now on the WGSL room declares to lack it. A software driver counts as a GPU."""
    monkeypatch.setattr(dispatch, "SOFTWARE", "no type")

    def declare(operator: str) -> None:
        monkeypatch.delitem(implements, operator)
        monkeypatch.setattr(implements, "lacks", frozenset({operator}))
        bind.cache_clear()

    with monkeypatch.context() as monkeypatch:
        yield declare
    bind.cache_clear()


@pytest.fixture
def values(make_checkpoint: Any, text_data: Path, tmp_path: Path) -> dict[str, Any]:
    values = {"--model": make_checkpoint(num_hidden_layers=1), "--data": text_data, "--out": tmp_path / "out"}
    return values | {
        "--lora-r": 3,
        "--max-length": 32,
        "--gradient-accumulation-steps": 1,
        "--max-steps": 1,
        "--no-sample": True,
    }


NEEDED = "device wgpu has no operator dropout, which this run needs: use another --device, or auto"


def test_a_run_that_needs_it_is_refused_before_it_starts(without: Any, values: Any, capsys: Any) -> None:
    without("dropout")
    assert main(["finetune", *words(values | {"--device": "wgpu", "--lora-dropout": 0.1})]) == 2
    said = capsys.readouterr()
    assert said.err == f"wgrad: error: {NEEDED}\n" and "data:" not in said.out
    assert not (values["--out"] / "config.yaml").exists()


def test_a_device_without_expressions_is_taken_where_none_are_needed(
    without: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By models without gates, say; not for Tensors."""
    without("fused")

    def needs_it(device: Any) -> None:
        raise OperatorMissing(device.name, "fused")

    assert select_device("wgpu", lambda device: None).lacks == {"fused"}
    with pytest.raises(DeviceUnavailable, match="device wgpu has no operator fused"):
        select_device("wgpu", needs_it)
    monkeypatch.setattr("wgrad.autograd.creation._devices", {})
    with pytest.raises(DeviceUnavailable, match="device wgpu has no operator fused"):
        wgrad.zeros(1, device="wgpu")
    assert wgrad.zeros(1, device="auto").device.name == "cpu"


def test_auto_moves_on_and_says_why(without: Any, values: Any, capsys: Any) -> None:
    without("dropout")
    assert main(["finetune", *words(values | {"--lora-dropout": 0.1})]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("device: "))
    assert line.startswith("device: NumPy") and "wgpu:0: it has no operator dropout, which this run needs" in line


def test_other_runs_take_it_as_before(without: Any, values: Any, capsys: Any) -> None:
    without("dropout")
    assert main(["finetune", *words(values)]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("device: "))
    assert not line.startswith("device: NumPy")


def test_plan_refuses_or_lists_it(without: Any, values: Any, capsys: Any) -> None:
    without("dropout")
    options = words({name: values[name] for name in ("--model", "--lora-r", "--max-length")} | {"--device": "wgpu"})
    assert main(["plan", *options]) == 0
    assert "this device lacks operators that the run does not need: dropout" in capsys.readouterr().out
    assert main(["plan", *options, "--lora-dropout", "0.1"]) == 2
    assert NEEDED in capsys.readouterr().err


def test_the_self_test_lists_it(without: Any, capsys: Any) -> None:
    without("log_odds")
    assert main(["selftest", "--device", "wgpu", "--only", "log_odds/"]) == 0
    said = capsys.readouterr().out
    assert "not run: no operator log_odds" in said and "not on this device: log_odds" in said and "all 0 passed" in said
    assert main(["selftest", "--device", "wgpu", "--only", "log_odds/", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["lacks"] == ["log_odds"] and report["passed"] == report["failed"] == 0


def test_inference_goes_to_the_next_device_too(without: Any, values: Any, capsys: Any) -> None:
    without("rope_append")
    options = ["generate", "--model", str(values["--model"]), "--prompt", "a", "--max-new-tokens", "2"]
    assert main([*options, "--device", "wgpu"]) == 2
    assert "device wgpu has no operator rope_append, which this run needs" in capsys.readouterr().err
    assert main(options) == 0
    assert "wgpu:0: it has no operator rope_append" in capsys.readouterr().err


def test_what_is_declared_is_an_operator_that_is_not_there() -> None:
    class Room:
        name = "room"
        float16 = bfloat16 = True
        implementations = Implementations(lacks={"add"})

    kind: Any = Room
    with pytest.raises(OperatorMissing, match="device room has no operator add"):
        bind(kind)().add(np.ones(3, np.float32), np.ones(3, np.float32))
    for wrong in ("ad", "gemm"):
        kind = type("Room", (Room,), {"implementations": Implementations(lacks={wrong})})
        kind.implementations("gemm")(lambda device, **arguments: None)
        with pytest.raises(ValueError, match=f"says that it lacks {wrong}"):
            bind(kind)


def test_no_device_lacks_more_than_it_declares() -> None:
    assert bind(WgpuDevice).lacks == implements.lacks == frozenset()
