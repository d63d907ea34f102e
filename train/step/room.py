"""Device memory that a run may take: what its options say, or what the driver still has."""

from __future__ import annotations

from dataclasses import dataclass

from wgrad.device.contract import Device
from wgrad.device.main_memory import free_memory
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.option_text import size
from wgrad.train.step.memory import limit_bytes

# Of the free memory a part stays free, for what the driver and other programs take later. Where the driver does not
# tell what is free, others may have more of it.
_RESERVE, _RESERVE_OF_TOTAL = 16, 4


@dataclass(frozen=True)
class Room:
    """limit: bytes, None where they are not known. words: where the number comes from, for people."""

    limit: int | None
    words: str


def room_of(config: RunOptions, device: Device) -> Room:
    """Return what a run with these options may take on this device."""
    limit = limit_bytes(config.limit)
    return Room(limit, config.limit_option) if limit else free_room(device)


def free_room(device: Device) -> Room:
    """Return what a command without a limit may take on this device."""
    if free := device.free_memory():
        reserve = free // _RESERVE
        return Room(free - reserve, f"free, less a reserve of {size(reserve)}")
    if device.shared_memory:
        free = free_memory()
        there = f" ({size(free)} are free)" if free else ""
        return Room(None, f"main memory is shared with other programs{there}")
    if not (total := device.facts.get("memory_bytes")):
        return Room(None, "free memory is not known")
    limit = total - total // _RESERVE_OF_TOTAL
    return Room(limit, f"three quarters of the GPU's {size(total)}: its driver does not say how much is free")
