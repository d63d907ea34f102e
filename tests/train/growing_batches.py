"""Batches in which sequences come and go, and each sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wgrad.device.contract import Device
from wgrad.train.inference.continuous import Batch
from wgrad.train.inference.generation import generate_ids
from wgrad.train.inference.growing import Growing
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.model import Model
from wgrad.train.options.generate_config import Sampling
from wgrad.train.step.build import build_frozen


def model_for(folder: Path, device: Device) -> Model:
    return build_frozen(load_model_config(folder), folder, device, positions=256)


def grow(batch: Batch, comes: Sequence[tuple[int, Growing]], steps: Sequence[int]) -> list[list[int]]:
    """comes: at which turn each would join. Each one's tokens."""
    waiting, found = list(comes), {one: list[int]() for _, one in comes}
    now, turn = {one: one for _, one in comes}, 0
    again: list[Growing] = []
    while waiting or again or batch.members:
        if batch.reads:
            batch.read_chunk()
        while again and batch.can_join(again[:1]):
            batch.join([again.pop()])
        due = [one for at, one in waiting if at <= turn][: batch.free]
        if due and batch.can_join(due):
            due = due[:1] if batch.is_long(due[0]) else due
            batch.join(due)
            waiting = [(at, one) for at, one in waiting if one not in due]
        if batch.growing:
            block = batch.queue(steps[turn % len(steps)])
            tokens = block.tokens()
            for part in block.parts:
                mine = now[part.sequence]
                found[mine] += tokens[: part.steps, part.row].tolist()
                if part.read_again:
                    again.append(mine.go_on(found[mine]))
                    now[again[-1]] = mine
        turn += 1
    return list(found.values())


def alone(model: Model, prompt: list[int], most: int, sampling: Sampling) -> list[int]:
    return list(generate_ids(model, prompt, most, sampling))
