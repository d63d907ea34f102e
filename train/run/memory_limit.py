"""--memory-limit, --vram: what a run would have to change to stay below it, found by planning that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from wgrad.device.contract import Device
from wgrad.device.errors import OutOfMemory, WgradError
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.option_text import parse_size, size
from wgrad.train.options.options import flag
from wgrad.train.run.memory_advice import SMALLER_MODEL

SHORTEST = 128  # tokens of the shortest rows that are tried


def limit_bytes(text: str | None) -> int | None:
    """Bytes of a value of --memory-limit."""
    return parse_size(text) if text else None


def hold_to_limit(device: Device, text: str | None, option: str = "--memory-limit") -> str:
    """Have the device keep to the value of an option. -> a remark for the user, or ""."""
    device.limit_memory(limit_bytes(text))
    return f"{option} has no effect: NumPy takes main memory" if text and device.name == "cpu" else ""


def beyond_limit(
    config: RunOptions, device: Device, reserved: Callable[[RunOptions, int | None], int], chosen: str = ""
) -> WgradError:
    """What is said of a run that its limit leaves no room for. reserved: plans a run under a limit -> the bytes that
    its pool takes; OutOfMemory where the limit is too low. chosen: options of it that nobody gave."""
    limit = limit_bytes(config.limit)
    assert limit is not None
    even = f"even with {chosen} " if chosen else ""
    takes = size(reserved(config, None))
    said = f"{config.limit_option}: {even}the run takes about {takes}, and the limit is {size(limit)}"
    words: list[str] = []
    for changes in _changes(config, device):
        config = replace(config, **changes)
        words = [word for word in words if word.partition(" ")[0] not in map(flag, changes)]
        words += [_option(name, value) for name, value in changes.items()]
        try:
            return WgradError(f"{said}: with {' '.join(words)} it takes {size(reserved(config, limit))}")
        except OutOfMemory:
            continue
    least, tried = size(reserved(config, None)), f" with {' '.join(words)}" if words else ""
    return WgradError(f"{said}: even{tried} it takes about {least}: allow it that, or {SMALLER_MODEL}")


def _option(name: str, value: Any) -> str:
    if value is False:
        return flag(f"no_{name}")
    return flag(name) if value is True else f"{flag(name)} {value}"


def _changes(config: RunOptions, device: Device) -> Iterator[dict[str, Any]]:
    """What makes a run smaller, what costs least first; each on top of those before it."""
    if not config.checkpointing:
        yield {"checkpointing": True}
    if config.keep_attention:
        yield {"keep_attention": False}
    if not device.shared_memory and not config.offload_checkpoints:
        yield {"offload_checkpoints": True}
    if not device.shared_memory and config.stream_weights == "off" and not config.full:
        yield {"stream_weights": "on"}
    rows = config.batch_size
    while rows > 1:
        rows //= 2
        yield {"batch_size": rows}
    tokens = config.seq_len
    while tokens >= 2 * SHORTEST:
        tokens //= 2
        yield {"seq_len": tokens}
