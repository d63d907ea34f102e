"""Settle what the options of a run leave open: batch and recomputed layers of all ranks, and each rank's mode."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from wgrad.device.contract import Device
from wgrad.device.shown import counted
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.model_files import opened_once
from wgrad.train.options.choices import AUTO
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.option_text import size
from wgrad.train.options.options import flag
from wgrad.train.plan.fit import KINDS, MODE, MOST_ROWS, OF_RECOMPUTED, Fit, Mode, words
from wgrad.train.plan.plan import Plan, plan_run
from wgrad.train.ranks.world import World
from wgrad.train.step.activations import recomputed_layers
from wgrad.train.step.room import Room, room_of

Config = TypeVar("Config", bound=RunOptions)


def batch_sizes(config: RunOptions, ranks: int = 1) -> list[int]:
    """Return the batch sizes that divide a step evenly, with a micro-batch for each rank, in rising order."""
    rows = config.examples_per_step
    sizes = [n for n in range(1, min(rows, MOST_ROWS) + 1) if rows % n == 0 and rows // n >= ranks]
    return sizes or [config.batch_size]


@dataclass(frozen=True)
class Settled(Generic[Config]):
    """Choices for a run."""

    config: Config  # options of the run, with its batch
    mode: Mode  # options of this rank that replace the run's
    lines: list[str]  # for people
    plan: Plan | None = None  # plan of both, if there is one
    limit: int | None = None  # bytes to limit the device to, although no option does


@opened_once()
def settle(
    config: Config, fit: Fit, room: Room, world: World, *, pinned: bool, before: Mode | None = None
) -> Settled[Config]:
    """Choose the batch that fits on every rank, the recomputed layers of all ranks, and the rest of this rank's mode.

    Args:
        config: Options of the run.
        fit: Planner of this rank.
        room: Memory that this rank may use.
        world: All ranks.
        pinned: Whether the batch is that of the resumed run.
        before: Mode of the resumed run.

    Raises:
        WgradError: Nothing fits.
    """
    automatic = config.gradient_checkpointing == AUTO
    if not automatic and not config.chooses_batch:
        return Settled(config, {}, [])
    found, limit, known = None, None, room.limit is not None and fit.device.dry_run() is not None
    if known:
        found, limit = _found(config, fit, [config.batch_size] if pinned else batch_sizes(config, world.size), before)
    mode = mode_of(found.config) if found is not None else fit.last_mode if known else {}
    recomputed = recomputed_layers(replace(config, **mode), fit.model_config) if automatic else 0
    vote = (found.config.batch_size if found is not None else None, recomputed)
    of_ranks = world.all_gather(vote, "what fits")
    batch = min((n for n, _ in of_ranks if n is not None), default=config.batch_size)
    settled = config.with_batch(batch)
    most = max(n for _, n in of_ranks)
    if most > recomputed:
        mode |= {"gradient_checkpointing": True if most == fit.layers else most}
    lines = []
    if config.chooses_batch and (known or batch != config.batch_size):
        lines.append(line(settled, mode, fit.limit))
    if automatic:
        lines.append(fit.described(found, room, max(most, recomputed)))
    same = found is not None and vote == (batch, most)
    return Settled(settled, mode, lines, found if same else None, limit)


def _found(config: RunOptions, fit: Fit, batches: list[int], before: Mode | None) -> tuple[Plan | None, int | None]:
    """Return the plan of the run, and `Settled.limit`. The plan is None if nothing fits and no option sets a limit."""
    if before and (found := fit.resumed(before)) is not None:
        return found, None if config.limit else fit.limit
    batches = batches if config.chooses_batch else [config.batch_size]
    if config.limit is not None:
        return fit.choose(batches), None
    if len(batches) == 1 and (found := fit.freely()) is not None:
        return found, None
    found = fit.find(batches)
    return found, None if found is None else fit.limit


def mode_of(config: RunOptions) -> Mode:
    """Return the mode in the options of a run."""
    return {
        name: value
        for name in (*MODE, *KINDS)
        if (value := getattr(config, name)) is not None
        or (name in OF_RECOMPUTED and config.gradient_checkpointing is False)
    }


def plan_as_run(
    config: RunOptions, model_config: ModelConfig, folder: str | os.PathLike[str], device: Device, prompt_tokens: int
) -> Plan | None:
    """Plan a run like `wgrad finetune` with these options, including its choices."""
    room = room_of(config, device)
    fit = Fit(config, model_config, folder, device, prompt_tokens, room.limit or 0)
    chosen = settle(config, fit, room, World(), pinned=False)
    settled = replace(chosen.config, **chosen.mode)
    return chosen.plan or plan_run(settled, model_config, folder, device, prompt_tokens)


def line(config: RunOptions, mode: Mode, limit: int) -> str:
    """Return a line for people about the chosen batch and mode."""
    batch = (
        f"{flag('batch_size')} {config.batch_size} {flag('gradient_accumulation_steps')} "
        f"{config.gradient_accumulation_steps}"
    )
    step = counted(config.examples_per_step, "pair" if config.rows > config.batch_size else "sequence")
    how = f" {words(mode)}" if mode else ""
    why = f"--vram ({size(limit)})" if config.vram else f"{size(limit)}"
    return f"chosen for {why}: {batch}{how}; a step is {step}, as asked"
