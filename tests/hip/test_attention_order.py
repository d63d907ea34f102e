"""Order of flash attention's work-groups: the queries that each takes on the emulated GPU, and the time of this order
in a model of the GPU (tests/hip/executor/grid.py)."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.hip.executor import grid
from wgrad.hip.runtime.architectures import dies

LENGTH, WIDTH = 390, 64  # two blocks of the forward, the second of 6 queries; of the backward's 256: two
UNITS = 304


def written(o: np.ndarray, block: int) -> list[tuple[int, int, int]]:
    """(batch, head, block) of what a kernel has written to what was NaN."""
    finite = np.asarray(np.isfinite(o.astype(np.float32)).all(3))  # [B, T, H]
    found = []
    for b, h in np.ndindex(o.shape[0], o.shape[2]):
        places = np.flatnonzero(finite[b, :, h])
        blocks = sorted(set((places // block).tolist()))
        assert len(places) == sum(min(block, LENGTH - n * block) for n in blocks)
        found += [(b, h, n) for n in blocks]
    return found


@pytest.fixture
def card(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = emulator.device("gfx942")
    monkeypatch.setattr(made, "compute_units", UNITS)
    return made


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("batch, heads", [(1, 3), (2, 5), (1, 8), (1, 14)])
def test_work_groups_are_placed_as_the_model_says(
    card: Any, monkeypatch: pytest.MonkeyPatch, batch: int, heads: int, backward: bool
) -> None:
    """Each by itself: what it writes is what it took."""
    dtype, pairs = ml_dtypes.bfloat16, batch * heads
    x = card.upload(np.ones((batch, LENGTH, heads, WIDTH), dtype))
    # Nobody sees more than one key: quick.
    starts = np.tile(np.arange(LENGTH, dtype=np.int32), (batch, 1))
    doc_start, none = card.upload(starts), card.upload(np.zeros(1, np.int32))
    rows = card.upload(np.zeros((batch, heads, LENGTH), np.float32))
    wanted = grid.orders(pairs, 2, dies(card))["placed"]
    for number in [0, 1, pairs - 1, pairs, 2 * pairs - 2]:
        monkeypatch.setenv("WGRAD_EMULATED_GROUPS", str(number))
        if backward:
            found = card.download(card.attention_backward(x, x, x, x, x, rows, doc_start, scale=1.0)[0])
        else:
            found = card.download(card.attention(x, x, x, doc_start, none, scale=1.0)[0])
        group = wanted[number]
        assert written(found, 256 if backward else 384) == [(group.pair // heads, group.pair % heads, group.block)]
        monkeypatch.delenv("WGRAD_EMULATED_GROUPS")


def test_the_dies_of_a_gpu_follow_from_its_compute_units(card: Any) -> None:
    counts = {}
    for units in (304, 228, 38, 4):
        card.compute_units = units
        counts[units] = dies(card)
    assert counts == {304: 8, 228: 6, 38: 1, 4: 1}
    assert dies(SimpleNamespace(architecture="gfx950", compute_units=256)) == 8


def test_the_model_places_every_block_once() -> None:
    for pairs, blocks, count in ((32, 22, 8), (14, 5, 8), (3, 4, 8), (7, 3, 1), (10, 6, 6)):
        for order in grid.orders(pairs, blocks, count).values():
            assert sorted(order) == [(pair, block) for pair in range(pairs) for block in range(blocks)]


def test_the_order_keeps_compute_units_busy() -> None:
    """By hand: two compute units on one die, work-groups of 2, 8, 14 tiles and the ends of each."""
    shape = grid.Shape(1, 900, 1, 1)
    groups = [grid.Group(0, 0), grid.Group(0, 1), grid.Group(0, 2)]
    tiles, ends = (6, 12, 15), 2
    whole = sum(tiles) + 3 * ends
    first = max(tiles[0] + tiles[2] + 2 * ends, tiles[1] + ends)
    assert grid.fill(shape, groups, units=2, dies=1).busy == pytest.approx(whole / (2 * first))
    best = max(tiles[2] + ends, tiles[1] + tiles[0] + 2 * ends)
    assert grid.fill(shape, groups[::-1], units=2, dies=1).busy == pytest.approx(whole / (2 * best))


def test_l2_is_read_into_once_where_it_holds_all() -> None:
    shape = grid.Shape(1, 768, 4, 2)
    once = 768 * 2 * 128 * 4
    groups = grid.orders(4, 2, 1)["placed"]
    assert grid.fill(shape, groups, units=1, dies=1).read == once
    # A die for each pair, which take both blocks of it: K and V of a group of two heads are read by two.
    assert grid.fill(shape, groups, units=4, dies=4).read == 2 * once
    # Nothing is kept: every work-group reads what it sees.
    assert grid.fill(shape, groups, units=1, dies=1, l2=0).read == 4 * (384 + 768) * 128 * 4


def test_committed_rows_are_the_model() -> None:
    kept = [json.loads(line) for line in grid.FILE.read_text().splitlines()]
    assert [r["shape"] for r in kept] == [str(s) for s in grid.SHAPES]
    assert list(grid.rows(grid.SHAPES[:4])) == kept[:4]


def test_the_order_of_the_kernels_pays() -> None:
    """Causal, T 8192, H 32, B 1: 65 % of the GPU busy head by head, and K and V read 10 times."""
    row = next(iter(grid.rows(grid.SHAPES[:1])))
    assert row["busy"]["head by head"] < 0.67 and row["busy"]["placed"] >= 0.93
    assert row["read"]["placed"] == 1.0 and row["read"]["long first"] > 10
