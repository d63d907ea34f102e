"""Device memory that a run may use: the limit of its options, or what the driver reports as free."""

from __future__ import annotations

from dataclasses import dataclass

from wgrad.device.contract import Device
from wgrad.device.main_memory import free_memory
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.option_text import size
from wgrad.train.step.memory import limit_bytes

# The fraction 1 / _RESERVE of the free memory is left to the driver and other programs. If the driver does not report
# free memory, 1 / _RESERVE_OF_TOTAL of all memory is left, since others may already use some.
_RESERVE, _RESERVE_OF_TOTAL = 16, 4


@dataclass(frozen=True)
class Room:
    """Memory that a run may use. limit: bytes; None: not known. words: where the limit comes from, for people."""

    limit: int | None
    words: str


def room_of(config: RunOptions, device: Device) -> Room:
    """Return the memory that a run with these options may use."""
    limit = limit_bytes(config.limit)
    return Room(limit, config.limit_option) if limit else free_room(device)


def free_room(device: Device) -> Room:
    """Return the memory that a command without a limit may use."""
    if (free := device.free_memory()) is not None:
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
