"""A sequence of a batch, and blocks of tokens that are queued for the sequences of a batch."""

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
    """A sequence of a batch.

    prompt: tokens to read when it joins. most: tokens to draw. uniforms: float32, at least as many.
    drawn: number of tokens queued; ids: those that the host has received.
    cached: number of its tokens whose keys are in its pages; shared: number that were there before it joined.
    model: by default that of the batch.
    """

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
    number: int = 0  # in the order of joining
    ids: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    model: Model | None = None

    @classmethod
    def begin(cls, prompt: Sequence[int], most: int, sampling: Sampling) -> Growing:
        return cls(prompt, most, settings_of(sampling), uniform_numbers(sampling.seed, most))

    def go_on(self, drawn: Sequence[int]) -> Growing:
        """Return the sequence with its drawn tokens as part of the prompt, to join again."""
        count = len(drawn)
        return Growing([*self.prompt, *drawn], self.most - count, self.settings, self.uniforms[count:])


class Part(NamedTuple):
    """A sequence's share of a block. steps: number of its tokens. read_again: it has left the batch and must join again
    with all of its tokens (`Growing.go_on`), since its cached keys are no longer valid."""

    sequence: Growing
    row: int
    steps: int
    read_again: bool


class Block:
    """Tokens that are queued to be drawn. seen: called with the parts once they have arrived."""

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
        """Wait for the logits float32 [rows, V], if they were kept; else return None. May be called once."""
        return None if self._logits is None else self._logits.result()
