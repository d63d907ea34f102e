"""A sequence that grows in a batch of others, and the tokens that are queued for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from wgrad.device.contract import Readback
from wgrad.train.inference.generation import settings_of, uniform_numbers
from wgrad.train.model.model import Model
from wgrad.train.options.generate_config import Sampling


@dataclass(eq=False)
class Growing:
    """A sequence of a batch. prompt: what is read when it joins. most: tokens to draw. uniforms: float32, at least as
    many. drawn: how many were queued, ids: those of them that the host has seen. cached: of how many of its tokens the
    keys are in the cache, in its pages; shared: of how many they were there before it came. model: which reads and
    draws it, by default the batch's."""

    prompt: Sequence[int]
    most: int
    settings: np.ndarray
    uniforms: np.ndarray
    bias: np.ndarray | None = None  # float32 [V]: added to the logits of the next token
    factors: np.ndarray | None = None  # float32 [V]: of the repetition penalty for the next token
    drawn: int = 0
    cached: int = 0
    shared: int = 0
    row: int = -1
    number: int = 0  # of those that have joined
    ids: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    model: Model | None = None

    @classmethod
    def begin(cls, prompt: Sequence[int], most: int, sampling: Sampling) -> Growing:
        return cls(prompt, most, settings_of(sampling), uniform_numbers(sampling.seed, most))

    def go_on(self, drawn: Sequence[int]) -> Growing:
        """The same sequence once more, to join with what was drawn as a part of its prompt."""
        count = len(drawn)
        return Growing([*self.prompt, *drawn], self.most - count, self.settings, self.uniforms[count:])


class Part(NamedTuple):
    """A sequence's share of a block. steps: how many of its tokens belong to it. read_again: it has left the batch,
    and must join once more with all of its tokens (`Growing.go_on`), as its cache is good for no more."""

    sequence: Growing
    row: int
    steps: int
    read_again: bool


class Block:
    """Tokens that were queued to be drawn. seen: called with the parts once they are here."""

    def __init__(
        self,
        parts: list[Part],
        steps: int,
        rows: int,
        tokens: Readback,
        logits: Readback | None,
        seen: Callable[[Sequence[Part]], None],
    ) -> None:
        self.parts, self.steps, self._rows, self._tokens, self._logits = parts, steps, rows, tokens, logits
        self._seen = seen

    def tokens(self) -> np.ndarray:
        """Wait for int32 [steps, rows]; -1 where logits were not finite. May be called once."""
        tokens = self._tokens.result().reshape(self.steps, self._rows)
        for part in self.parts:
            part.sequence.ids += tokens[: part.steps, part.row].tolist()
        self._seen(self.parts)
        return tokens

    def logits(self) -> np.ndarray | None:
        """Wait for float32 [rows, V] that the tokens were drawn from, where they were kept. May be called once."""
        return None if self._logits is None else self._logits.result()
