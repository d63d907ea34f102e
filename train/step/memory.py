"""The memory limit of a run, and advice for out-of-memory errors, which devices raise without knowing options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from wgrad.device.contract import Device
from wgrad.device.errors import OutOfMemory, WgradError
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.option_text import parse_size

SMALLER_MODEL = "use a smaller model"


def limit_bytes(text: str | None) -> int | None:
    """Return the bytes of a value of --memory-limit."""
    return parse_size(text) if text else None


def hold_to_limit(device: Device, text: str | None, option: str = "--memory-limit") -> str:
    """Limit the device's memory to the value of an option. Return a remark for the user, or ""."""
    device.limit_memory(limit_bytes(text))
    return f"{option} has no effect: NumPy takes main memory" if text and device.name == "cpu" else ""


@contextmanager
def advising(advice: str) -> Iterator[None]:
    """Turn an out-of-memory error in the block, of the device or the host, into a WgradError that ends in `advice`."""
    try:
        yield
    except OutOfMemory as error:
        raise WgradError(f"{error}: {advice}") from error
    except MemoryError as error:  # NumPy's says how much
        raise WgradError(f"out of main memory{f' ({error})' if str(error) else ''}: {advice}") from error


def for_parameters(config: RunOptions) -> str:
    """Return advice for when trained weights, gradients and moments do not fit into memory."""
    if config.full:
        return "leave --full out to train an adapter, or use a smaller model"
    if config.adapter:
        return "use a smaller --adapter, or a smaller model"
    return f"use a --lora-r below {config.lora_r}, or fewer --target-modules"


def for_steps(config: RunOptions, recompute: bool) -> str:
    """Return advice for when activations do not fit into memory. recompute: whether all are recomputed already."""
    advice = f"use a smaller {'--batch-size or ' if config.batch_size > 1 else ''}--max-length"
    return advice if recompute else f"{advice}, or --gradient-checkpointing"
