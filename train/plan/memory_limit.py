"""Advice for runs beyond --memory-limit or --vram: the changes that would make them fit, found by planning."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from wgrad.device.contract import Device
from wgrad.device.errors import DoesNotFit, WgradError
from wgrad.train.model.model import MLP_CHUNK_BYTES, MLP_CHUNKS_ABOVE
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.weights import mlp_row_bytes
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.option_text import size
from wgrad.train.options.options import flag
from wgrad.train.step.activations import itemsize_of, mlp_chunk_bytes
from wgrad.train.step.memory import SMALLER_MODEL, limit_bytes

SHORTEST = 128  # tokens of the shortest sequences that are tried


def fewest_offloaded(
    found: Any, layers: int, fitting: Callable[[RunOptions], Any], seem_to_stay: int | None = None
) -> Any:
    """Return a plan that fits with the fewest layers' inputs offloaded.

    Args:
        found: Plan that fits with the inputs of all layers offloaded.
        layers: Layers of the model.
        fitting: Plans a run; returns None if it does not fit.
        seem_to_stay: Number of inputs that the free bytes suffice for, if known. Seldom more fit, since the pool's
            blocks have gaps.
    """

    @cache
    def plan(number: int) -> Any:
        return fitting(replace(found.config, offload_activations=number))

    most = layers - 1  # all, because the last layer's input is never offloaded (model.py)
    if most < 1:
        return found
    first = 0 if seem_to_stay is None else max(most - max(seem_to_stay, 0), 0)  # no fewer, as it seems
    if not first and plan(0) is not None:
        return plan(0)
    number = first + bisect_left(range(first, most), True, key=lambda number: plan(number) is not None)
    if number == first > 0 and plan(first - 1) is not None:
        number = bisect_left(range(first - 1), True, key=lambda number: plan(number) is not None)
    return plan(number) if number < most else found


def in_large_chunks(found: Any, config: RunOptions, fitting: Callable[[RunOptions], Any]) -> Any:
    """Return a plan of a run whose MLP works in the largest chunks, if that fits; else `found`.

    Small chunks are slower, and often the loss takes more memory anyway (bench/notes/checkpointing.md).
    """
    if not may_have_larger_chunks(config):
        return found
    return fitting(replace(config, mlp_chunk=f"{MLP_CHUNK_BYTES >> 20}MiB")) or found


def may_have_larger_chunks(config: RunOptions) -> bool:
    """Return whether a run has its MLP in chunks whose size is not given and could be larger."""
    chunk = mlp_chunk_bytes(config)
    if config.mlp_chunk is not None or not config.gradient_checkpointing or not chunk or chunk >= MLP_CHUNK_BYTES:
        return False
    return config.rows * config.max_length > MLP_CHUNKS_ABOVE


def in_small_chunks(config: RunOptions, model: ModelConfig) -> RunOptions | None:
    """Return the options of a run whose MLP works in chunks although its sequences are short.

    Without chunks, it may take more memory than a larger run with them. None: it has chunks, or they save nothing.
    """
    tokens, chunk = config.rows * config.max_length, mlp_chunk_bytes(config) or MLP_CHUNK_BYTES
    whole = tokens * mlp_row_bytes(model, itemsize_of(config))
    if config.mlp_chunk is not None or not config.gradient_checkpointing or tokens > MLP_CHUNKS_ABOVE or whole <= chunk:
        return None
    return replace(config, mlp_chunk=f"{max(chunk >> 20, 1)}MiB")


def beyond_limit(
    config: RunOptions, device: Device, layers: int, plan: Callable[[RunOptions, int | None], Any], chosen: str = ""
) -> WgradError:
    """Return the error for a run that does not fit its limit, with advice.

    Args:
        config: Options of the run.
        device: Device of the run.
        layers: Layers of the model.
        plan: Plans a run under a limit; raises DoesNotFit if it does not.
        chosen: Options of the run that wgrad has chosen, for the message.
    """
    limit = limit_bytes(config.limit)
    assert limit is not None
    even = f"even with {chosen} " if chosen else ""
    takes = _takes(plan(config, None))
    said = f"{config.limit_option}: {even}the run takes about {takes}, and the limit is {size(limit)}"

    def fitting(config: RunOptions) -> Any:
        try:
            return plan(config, limit)
        except DoesNotFit:
            return None

    changes: dict[str, Any] = {}
    for change in _changes(config, device):
        changes |= change
        found = fitting(replace(config, **changes))
        if found is None:
            continue
        if "offload_activations" in changes:
            found = fewest_offloaded(found, layers, fitting)
            changes["offload_activations"] = found.config.offload_activations
        return WgradError(f"{said}: with {_words(changes)} it takes {_takes(found)}")
    if not changes:
        return WgradError(f"{said}: allow it that, or {SMALLER_MODEL}")
    least = _takes(plan(replace(config, **changes), None))
    return WgradError(f"{said}: even with {_words(changes)} it takes about {least}: allow it that, or {SMALLER_MODEL}")


def _takes(plan: Any) -> str:
    return size(plan.reserved_bytes)


def _words(changes: dict[str, Any]) -> str:
    return " ".join(as_option(*change) for change in changes.items() if change != ("offload_activations", 0))


def as_option(name: str, value: Any) -> str:
    """Return an option with its value as on a command line."""
    if value is False:
        return flag(f"no_{name}")
    return flag(name) if value is True else f"{flag(name)} {value}"


def can_stream(config: RunOptions) -> bool:
    """Return whether the run has frozen weights that may stay in host memory."""
    return not config.full and config.qat is None and not config.keep_dequantized


def _changes(config: RunOptions, device: Device) -> Iterator[dict[str, Any]]:
    """Yield changes that make a run smaller, the cheapest first, each in addition to those before it."""
    if config.keep_dequantized:
        yield {"keep_dequantized": False}
        config = replace(config, keep_dequantized=False)
    if not config.gradient_checkpointing:
        yield {"gradient_checkpointing": True}
    if config.keep_attention:
        yield {"keep_attention": False}
    if not device.shared_memory and config.offload_activations is not True:
        yield {"offload_activations": True}
    if not device.shared_memory and config.stream_weights == "off" and can_stream(config):
        yield {"stream_weights": "on"}
    if config.resident_layers:
        yield {"resident_layers": 0}
    rows = config.batch_size
    while rows > 1:
        rows //= 2
        yield {"batch_size": rows}
    tokens = config.max_length
    while tokens >= 2 * SHORTEST:
        tokens //= 2
        yield {"max_length": tokens}
