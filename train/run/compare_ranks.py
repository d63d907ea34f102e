"""Checks that all ranks of a run have the same options and start from the same parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import wgrad
from wgrad.device.errors import WgradError
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.options import flag
from wgrad.train.ranks.alike import check_alike, table
from wgrad.train.ranks.deal import even_shares
from wgrad.train.ranks.world import World
from wgrad.train.run.session import Session
from wgrad.train.step.optim import AdamW


def compare_ranks(session: Session, world: World, info: Mapping[str, Any], *, shown: bool = True) -> None:
    """Check that all ranks were started for the same run, and print a table of them.

    Args:
        session: Session of this rank.
        world: All ranks.
        info: Result of `run_info`.
        shown: Whether to print the table.

    Raises:
        WgradError: Ranks differ, or there are more ranks than micro-batches in a step.
    """
    if world.alone:
        return
    config = session.config
    if config.gradient_accumulation_steps < world.size:
        raise WgradError(
            f"--gradient-accumulation-steps: a step of {config.gradient_accumulation_steps} micro-batches cannot be "
            f"shared by {world.size} ranks: give --gradient-accumulation-steps {world.size} or more (with a smaller "
            "--batch-size the step stays as large), or start fewer ranks"
        )
    kinds = ("adapter", "training")
    same = [f for f in fields(RunOptions) if not f.metadata["path"] and f.metadata["group"] in kinds]
    values = {flag(f.name): getattr(config, f.name) for f in same} | {"--save-steps": config.save_steps}
    values |= info["run"] | {"the training data": info["data"], "wgrad": wgrad.__version__}
    check_alike(world, values)
    if not shown:
        return
    for line in table(world, session.device.description, even_shares(config.gradient_accumulation_steps, world.size)):
        session.say(line)
    if not world.tolerant:
        session.say("note: a lost rank ends this run, which then goes on from its last checkpoint with --resume")


def compare_starts(optimizer: AdamW, world: World) -> None:
    """Raise WgradError if a rank starts from other parameters, such as another --adapter or checkpoint."""
    if not world.alone:
        digest = hashlib.blake2b(digest_size=16)
        for array in optimizer.state_arrays().values():
            digest.update(array.tobytes())
        check_alike(world, {"--adapter or --resume": digest.hexdigest()})
