"""Changes of logits that a request asks for: penalties for drawn tokens, and a bias for single tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class LogitEdits:
    """Changes of logits as in OpenAI's API.

    presence: subtracted for each token that the answer contains. frequency: subtracted for each of its occurrences.
    repetition: divides the logits of tokens in the prompt or the answer; negative ones are multiplied.
    bias: added to the logits of single ids.
    """

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: Mapping[int, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.adds or self.repetition != 1

    @property
    def adds(self) -> bool:
        """Return whether anything is added to logits."""
        return bool(self.presence or self.frequency or self.bias)

    def as_bias(self, vocab_size: int, drawn: Sequence[int]) -> np.ndarray:
        """Return float32 [V] to add to logits; without penalties the same array each time."""
        if self.presence or self.frequency:
            bias = np.zeros(vocab_size, np.float32)
            self.add_to(bias, drawn)
            return bias
        if vocab_size not in self._made:
            self._made[vocab_size] = np.zeros(vocab_size, np.float32)
            self.add_to(self._made[vocab_size], ())
        return self._made[vocab_size]

    @cached_property
    def _made(self) -> dict[int, np.ndarray]:
        return {}

    def add_to(self, logits: np.ndarray, drawn: Sequence[int]) -> None:
        """Apply the changes to float32 [V], logits or a bias, in place. drawn: the ids of the answer so far."""
        ids, counts = np.unique(np.asarray(drawn, np.int64), return_counts=True)
        logits[ids] -= (self.presence + self.frequency * counts).astype(np.float32)
        for id_, value in self.bias.items():
            logits[id_] += value
