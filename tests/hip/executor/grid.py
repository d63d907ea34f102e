"""hip_grid: how the work-groups of a causal attention fill a GPU, and what its dies read of K and V.

A compute unit holds one work-group of the forward (by its registers). Work-groups start in the order of their numbers:
number n on die n % dies, on that compute unit of it which is free first (list scheduling). One takes as long as it
walks tiles of keys, and a little for start and end. The L2 of a die keeps the keys and values that it read last. Three
orders of the same work-groups are compared; "placed" is the kernels' (hip/attention/attention_order.hpp). A model: no
card has confirmed it.
"""

from __future__ import annotations

import heapq
import json
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from tests.hip.executor.table import RESULTS, Row

UNITS, DIES, L2 = 304, 8, 4 << 20  # MI300X; bytes of L2 on a die
BLOCK, TILE = 384, 64  # queries of a work-group, keys of a tile: attention_forward.hip on CDNA
_ENDS = 2.0  # tiles that start and end of a work-group take: hip_attention's `busy` beside its `busy_loop`
_STRETCHES = 128  # of a sequence: what comes and goes in L2 is one, of at least a tile
FILE = RESULTS / "hip_grid.jsonl"


class Shape(NamedTuple):
    """The shape of a causal attention in 16 bits."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    width: int = 128

    def __str__(self) -> str:
        return "x".join(map(str, self))


SHAPES = (
    Shape(1, 8192, 32, 8),
    Shape(4, 2048, 32, 8),
    Shape(1, 2048, 32, 8),
    Shape(1, 8192, 14, 2, 64),
    Shape(1, 32768, 32, 8),
    Shape(1, 131072, 32, 8),
)


class Group(NamedTuple):
    """The part of a work-group. pair: head of all batch elements; block: of queries, from the first."""

    pair: int
    block: int


def _placed(pairs: int, blocks: int, dies: int) -> Iterator[Group]:
    """Long blocks first over the whole grid; of each row of it, neighboring heads on one die."""
    for row in range(blocks):
        die = [(pairs * row + x) % dies for x in range(pairs)]
        taken = {x: pair for pair, x in enumerate(sorted(range(pairs), key=lambda x: (die[x], x)))}
        yield from (Group(taken[x], blocks - 1 - row) for x in range(pairs))


def orders(pairs: int, blocks: int, dies: int) -> dict[str, list[Group]]:
    """Return the orders of work-groups, by name."""
    return {
        "head by head": [Group(pair, block) for pair in range(pairs) for block in reversed(range(blocks))],
        "long first": [Group(pair, block) for block in reversed(range(blocks)) for pair in range(pairs)],
        "placed": list(_placed(pairs, blocks, dies)),
    }


def _tiles(shape: Shape, block: int) -> int:
    """Count the tiles that a block of queries sees."""
    return -(-min((block + 1) * BLOCK, shape.length) // TILE)


class Filled(NamedTuple):
    """busy: share of the compute units' time until the last ends; read: bytes of K and V that all dies' L2 read."""

    busy: float
    read: int


def fill(shape: Shape, groups: list[Group], *, units: int = UNITS, dies: int = DIES, l2: int = L2) -> Filled:
    """Runs work-groups by the model."""
    free = [[0.0] * (units // dies) for _ in range(dies)]
    starts: list[list[tuple[float, Group]]] = [[] for _ in range(dies)]
    whole = 0.0
    for number, group in enumerate(groups):
        die, time = number % dies, _tiles(shape, group.block) + _ENDS
        start = heapq.heappop(free[die])
        heapq.heappush(free[die], start + time)
        starts[die].append((start, group))
        whole += time
    busy = whole / (units // dies * dies * max(map(max, free)))
    return Filled(busy, sum(_read(shape, of_die, l2) for of_die in starts))


def _read(shape: Shape, starts: list[tuple[float, Group]], l2: int) -> int:
    """Count the bytes that one die's L2 reads: ranges of keys over time, of which it keeps the last."""
    stretch = max(TILE, shape.length // _STRETCHES)
    nbytes = stretch * shape.width * 2 * 2
    visits = [
        (start + key / TILE, group.pair * shape.kv_heads // shape.heads, key)
        for start, group in starts
        for key in range(0, _tiles(shape, group.block) * TILE, stretch)
    ]
    kept: OrderedDict[tuple[int, int], None] = OrderedDict()
    missed = 0
    for _, kv_pair, key in sorted(visits):
        if (kv_pair, key) in kept:
            kept.move_to_end((kv_pair, key))
            continue
        missed += 1
        kept[kv_pair, key] = None
        if len(kept) * nbytes > l2:
            kept.popitem(last=False)
    return missed * nbytes


def write() -> None:
    """Write the committed rows again."""
    FILE.write_text("".join(json.dumps(row) + "\n" for row in rows()), encoding="utf-8")


def rows(shapes: tuple[Shape, ...] = SHAPES) -> Iterator[Row]:
    """Make the rows: for each shape and order, how busy the GPU is and how often K and V are read."""
    for shape in shapes:
        pairs, blocks = shape.batch * shape.heads, -(-shape.length // BLOCK)
        once = shape.batch * shape.length * shape.kv_heads * shape.width * 2 * 2
        found = {name: fill(shape, groups) for name, groups in orders(pairs, blocks, DIES).items()}
        yield {
            "shape": str(shape),
            "work_groups": pairs * blocks,
            "busy": {name: round(f.busy, 4) for name, f in found.items()},
            "read": {name: round(f.read / once, 2) for name, f in found.items()},
        }
