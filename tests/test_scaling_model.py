"""bench/scaling_model.py: what of a bucket's way is hidden behind the backward, by times that a person can add up."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest

THERE = [10.0, 20.0, 30.0]  # when the device is done with each bucket


@pytest.fixture
def model(monkeypatch: Any) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "bench"))
    return importlib.import_module("scaling_model")


def seconds(rate: float, nbytes: float) -> float:
    return rate * nbytes


@pytest.mark.parametrize(
    "sizes, read, add, link, send, end",
    [
        ([4, 4, 4], 0, 0, 0, 0, 30),
        ([4, 4, 1], 1, 0.5, 0, 1, 30 + 2.5),  # all but the last bucket's way is hidden
        ([4, 4, 1], 2, 0, 0, 2, 10 + 16 + 16 + 4),  # the host is never idle once the first bucket is there
        ([4, 4, 4], 0, 0, 5, 0, 10 + 60),  # nor is the network
        ([2, 2, 2], 0, 0, 4, 1, 30 + 8 + 2),  # it is, between buckets
    ],
)
def test_what_is_left_when_the_backward_ends(
    model: Any, sizes: list[float], read: float, add: float, link: float, send: float, end: float
) -> None:
    costs = [partial(seconds, rate) for rate in (read, add, link, send)]
    assert model.finished(THERE, sizes, *costs) == pytest.approx(end)


def test_a_prediction_is_one_cards_step_and_what_adding_up_prolongs_it_by(model: Any) -> None:
    """A sum of 1 ms a byte: of the last bucket's 3 nothing is hidden, of the others all."""
    work = {"work": "w"}
    rows: list[dict[str, Any]] = [
        {"what": "one", **work, "ms_per_step": 31.0},
        {"what": "through", **work, "ms_per_step": 36.0, "update_ms": 1.0,
         "bucket_bytes": [4, 4, 3], "backward_ms": [10, 10, 10]},
        {"what": "weak", **work, "ms_per_step": 40.0, "ranks": 2},
    ]  # fmt: skip
    for n in (1, 8):
        rows.append({"what": "bytes", "bytes": n, "read_back_ms": 0.1 * n, "exchange_ms": n, "upload_ms": 0.1 * n})
    known = model.measured(model.Parts(rows), "w")
    assert known["predicted_ms"] == pytest.approx(36 + 3) and known["off"] == pytest.approx(-0.025)
