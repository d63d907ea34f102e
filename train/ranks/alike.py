"""Check that all ranks were started for the same run, before anything slow is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.ranks.world import World


def check_alike(world: World, values: Mapping[str, Any]) -> None:
    """Raise WgradError on every rank if a value differs from that of the first rank.

    values: JSON-like values, by name.
    """
    everywhere = world.all_gather(dict(values), "comparing the ranks")
    first = everywhere[0]
    for member, other in zip(world.members, everywhere):
        for name in first.keys() | other.keys():
            if first.get(name) != other.get(name):
                raise WgradError(
                    f"{name}: is {_shown(other.get(name))} on {member}, and {_shown(first.get(name))} on "
                    f"{world.members[0]}: start all ranks with the same options, files and version"
                )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}..."


def table(world: World, device: str, shares: list[int]) -> list[str]:
    """Return a line for each rank: host, device, and its number of a step's micro-batches."""
    devices = world.all_gather(device, "the devices of the ranks")
    rows = [
        (f"  rank {member.number}", member.host, name, f"{share} of {sum(shares)} micro-batches a step")
        for member, name, share in zip(world.members, devices, shares)
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[3]]) for row in rows]
