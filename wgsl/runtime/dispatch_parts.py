"""Split a launch into several dispatches of a part of its workgroups each, so that none runs long.

The workgroups stay the same, so results do not depend on the split.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from wgrad.device.memory import Array
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.runtime import Runtime


def ranges(count: int, longest: float) -> list[tuple[int, int]]:
    """Return (first, last + 1) ranges of `count`, about equally long, none longer than `longest` (but at least 1)."""
    parts = math.ceil(count / max(1, math.floor(longest)))
    step = math.ceil(count / parts)
    return [(first, min(first + step, count)) for first in range(0, count, step)]


def range_parts(count: int, work: float, most: float, heaviest: float = 1.0) -> list[tuple[int, int]]:
    """Return ranges of `count` workgroups in a row, each of at most `most` work where possible.

    work: of all. heaviest: how many times the mean a workgroup may have.
    """
    return [(0, count)] if work <= most else ranges(count, count * most / (heaviest * work))


def tile_parts(groups: tuple[int, int, int], work: float, most: float) -> list[tuple[int, int, int, int]]:
    """Return (first x, first y, x, y) of parts of a grid of workgroups, each of at most `most` work where possible.

    A part is rows of the grid, or a piece of one row. All of z stay together.
    """
    x, y, _ = groups
    if work <= most:
        return [(0, 0, x, y)]
    tiles = x * y * most / work  # that a part may have
    return [(x0, y0, x1 - x0, y1 - y0) for y0, y1 in ranges(y, tiles / x) for x0, x1 in ranges(x, tiles)]


def launch_range(
    device: Runtime,
    shader: str,
    arrays: Sequence[Array | None],
    params: Sequence[int | float],
    count: int,
    constants: Mapping[str, Constant],
    *,
    work: float,
    heaviest: float,
) -> None:
    """Launch `count` workgroups in a row, in as many dispatches as `Runtime.dispatch_work` asks for.

    The shader's last parameters are the first workgroup, and the one after the last. heaviest: as in `range_parts`.
    """
    for first, end in range_parts(count, work, device.dispatch_work, heaviest):
        groups, share = device.groups(end - first, 1), (end - first) / count
        device.launch(shader, arrays, [*params, first, end], groups, constants, work=work * share)


def launch_tiles(
    device: Runtime,
    shader: str,
    arrays: Sequence[Array | None],
    params: Sequence[int | float],
    groups: tuple[int, int, int],
    constants: Mapping[str, Constant],
    *,
    work: float,
) -> None:
    """Launch a grid of tiles, in as many dispatches as `Runtime.dispatch_work` asks for.

    The shader's last parameters are the x and y of the first tile.
    """
    for x0, y0, x, y in tile_parts(groups, work, device.dispatch_work):
        share = x * y / (groups[0] * groups[1])
        device.launch(shader, arrays, [*params, x0, y0], (x, y, groups[2]), constants, work=work * share)
