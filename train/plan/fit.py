"""Settings that fit into a memory size, found by dry runs: those that --vram chooses, the longest rows, the largest
batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from wgrad.device.contract import Device
from wgrad.device.errors import OutOfMemory
from wgrad.train.data.packing import ROW_STEP
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.option_text import size
from wgrad.train.options.options import flag
from wgrad.train.plan.memory_limit import as_option, beyond_limit, fewest_parked
from wgrad.train.plan.plan import Plan, plan_run, run_dry
from wgrad.train.ranks.world import World
from wgrad.train.step.memory import limit_bytes

MOST_ROWS = 1024  # of a batch that is tried
_FIRST = 8  # what is planned beside 1, to see what one more takes
_SPARE = 64  # a part of the limit: a run's order of work, and so its pool's gaps, is not quite the plan's (0.2 % seen)

Mode = dict[str, Any]  # options that say where a run keeps what it needs later
Config = TypeVar("Config", bound=RunOptions)


def modes(config: RunOptions, device: Device) -> Iterator[Mode]:
    """Ways to run `config` where its options leave a choice: what costs least time first, what takes least last. Where
    they leave --offload-activations open it is of all layers."""
    parked, streamed = config.offload_activations, config.stream_weights == "on"
    if config.gradient_checkpointing is not True and not parked and not streamed:
        yield {"gradient_checkpointing": False, "offload_activations": False, "stream_weights": "off"}
    if config.gradient_checkpointing is False:
        return
    if device.shared_memory:
        yield {"gradient_checkpointing": True, "stream_weights": "on" if streamed else "off"}
        return
    if not parked and not streamed:
        yield {"gradient_checkpointing": True, "offload_activations": False, "stream_weights": "off"}
    if not streamed:
        yield {"gradient_checkpointing": True, "offload_activations": parked or True, "stream_weights": "off"}
    if config.stream_weights != "off" and not config.full:
        yield {"gradient_checkpointing": True, "offload_activations": parked or True, "stream_weights": "on"}


def words(mode: Mode) -> str:
    """A mode as options."""
    if not mode["gradient_checkpointing"]:
        return "--no-gradient-checkpointing"
    parked = mode.get("offload_activations")
    kept = as_option("offload_activations", parked) if parked else "--gradient-checkpointing"
    return f"{kept} --stream-weights on" if mode["stream_weights"] == "on" else kept


@dataclass(frozen=True)
class Fit:
    """Plans of a run and of its variations. limit: bytes of the device that it may take; a little of it stays free."""

    config: RunOptions
    model_config: ModelConfig
    folder: str | os.PathLike[str]
    device: Device
    prompt_tokens: int
    limit: int

    def plan(self, **changes: Any) -> Plan | None:
        """Plan the run with other options; None if it does not fit."""
        return self._fitting(replace(self.config, **changes))

    def _fitting(self, config: RunOptions) -> Plan | None:
        try:
            return self._plan(config, self.limit - self.limit // _SPARE)
        except OutOfMemory:
            return None

    def _plan(self, config: RunOptions, limit: int | None) -> Plan:
        return run_dry(config, self.model_config, self.folder, self.device, self.prompt_tokens, limit)

    def choose(self, batches: list[int]) -> Plan:
        """The first mode in which any of the batch sizes (rising) fits, with the largest that does, and of that with as
        few layers parked as can be; a step has as many rows as the configuration's. WgradError: none fits."""
        rows = self.config.batch_size * self.config.gradient_accumulation_steps
        for mode in modes(self.config, self.device):
            plan = partial(self._of_batch, batches, rows, mode)
            found = plan(len(batches)) or (plan(count) if (count := self._largest(plan, len(batches) - 1)) else None)
            if found is not None:
                left_open = mode.get("offload_activations") and not self.config.offload_activations
                return fewest_parked(found, self.model_config.num_hidden_layers, self._fitting) if left_open else found
        least = replace(self.config, batch_size=batches[0], gradient_accumulation_steps=rows // batches[0], **mode)
        chosen = f"{flag('batch_size')} {least.batch_size} {words(mode)}"
        raise beyond_limit(least, self.device, self.model_config.num_hidden_layers, self._plan, chosen)

    def _of_batch(self, batches: list[int], rows: int, mode: Mode, number: int) -> Plan | None:
        batch = batches[number - 1]
        return self.plan(batch_size=batch, gradient_accumulation_steps=rows // batch, **mode)

    def longest_rows(self, mode: Mode) -> int:
        """Tokens of the longest rows of which a batch of one fits; 0: none do. No longer than what the model was made
        for."""
        most = self.model_config.max_position_embeddings
        plan = partial(self._of_length, mode)
        return min(ROW_STEP * self._largest(plan, -(-most // ROW_STEP)), most)

    def _of_length(self, mode: Mode, steps: int) -> Plan | None:
        return self.plan(batch_size=1, max_length=steps * ROW_STEP, **mode)

    def largest_batch(self, mode: Mode) -> int:
        """Rows of the largest batch that fits, at most MOST_ROWS; 0: none does."""
        return self._largest(lambda rows: self.plan(batch_size=rows, **mode), MOST_ROWS)

    def _largest(self, plan: Callable[[int], Plan | None], most: int) -> int:
        """The largest number up to `most` of which there is a plan, 0 where there is none of 1. What one more takes is
        nearly always the same, so it is first looked for beside where that leads."""
        if most < 1 or (one := plan(1)) is None:
            return 0
        low, high = 1, most + 1  # fits; does not
        several = min(_FIRST, most)
        if several > 1 and (more := plan(several)) is None:
            high = several
        elif several > 1 and more is not None:
            low = several
            each = max((more.peak_bytes - one.peak_bytes) / (several - 1), 1)
            end = several + (self.limit - more.peak_bytes) / each
            for guess in (int(0.95 * end), int(1.05 * end)):
                if low < guess < high:
                    low, high = (guess, high) if plan(guess) is not None else (low, guess)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if plan(middle) is not None else (low, middle)
        return low


def batch_sizes(config: RunOptions, ranks: int = 1) -> list[int]:
    """Into what the rows of a step can be cut, as many in each micro-batch, and a micro-batch for each rank; rising."""
    rows = config.batch_size * config.gradient_accumulation_steps
    sizes = [n for n in range(1, min(rows, MOST_ROWS) + 1) if rows % n == 0 and rows // n >= ranks]
    return sizes or [config.batch_size]


def settle(config: Config, fit: Fit, world: World, *, pinned: bool) -> tuple[Config, Mode, str]:
    """--vram: the configuration with the batch that fits on every rank, the mode of this rank, and what is said of it.

    pinned: the batch is that of a run which goes on. WgradError: nothing fits.
    """
    chosen = None
    if fit.device.dry_run() is not None:
        chosen = fit.choose([config.batch_size] if pinned else batch_sizes(config, world.size)).config
    of_ranks = world.all_gather(chosen.batch_size if chosen is not None else None, "what fits")
    batch = min((n for n in of_ranks if n is not None), default=config.batch_size)
    settled = replace(
        config,
        batch_size=batch,
        gradient_accumulation_steps=config.batch_size * config.gradient_accumulation_steps // batch,
    )
    if chosen is None:  # NumPy, where other ranks may have a limit
        return settled, {}, line(settled, {}, fit.limit) if batch != config.batch_size else ""
    mode = {name: getattr(chosen, name) for name in ("gradient_checkpointing", "offload_activations", "stream_weights")}
    return settled, mode, line(settled, mode, fit.limit)


def plan_as_run(
    config: RunOptions, model_config: ModelConfig, folder: str | os.PathLike[str], device: Device, prompt_tokens: int
) -> Plan | None:
    """`plan_run` of what `wgrad finetune` with these options would do: with --vram what that chooses."""
    limit = limit_bytes(config.vram)
    if limit is None or device.dry_run() is None:
        return plan_run(config, model_config, folder, device, prompt_tokens)
    return Fit(config, model_config, folder, device, prompt_tokens, limit).choose(batch_sizes(config))


def line(config: RunOptions, mode: Mode, limit: int) -> str:
    """Describe a choice."""
    batch = (
        f"{flag('batch_size')} {config.batch_size} {flag('gradient_accumulation_steps')} "
        f"{config.gradient_accumulation_steps}"
    )
    rows = config.batch_size * config.gradient_accumulation_steps
    what = f"{'pair' if config.rows > config.batch_size else 'sequence'}{'s' * (rows > 1)}"
    how = f" {words(mode)}" if mode else ""
    return f"chosen for --vram ({size(limit)}): {batch}{how}; a step is {rows} {what}, as asked"


def limit_of(config: RunOptions, device: Device) -> int | None:
    """Bytes that a run may take: its limit, else all that the device has, where that is known."""
    return limit_bytes(config.limit) or device.facts.get("memory_bytes")
