"""Changes of logits by what a request says of single tokens: penalties for those it has drawn, and a bias."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class LogitEdits:
    """As OpenAI's API has them. presence: taken from the logit of each token that the answer has; frequency: from it
    as often as the answer has it; bias: added to single ids."""

    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.presence or self.frequency or self.bias)

    def apply(self, logits: np.ndarray, drawn: Sequence[int]) -> np.ndarray:
        """logits float32 [V] and the ids of the answer so far -> other logits."""
        edited = logits.copy()
        ids, counts = np.unique(np.asarray(drawn, np.int64), return_counts=True)
        edited[ids] -= self.presence + self.frequency * counts
        for id_, value in self.bias.items():
            edited[id_] += value
        return edited.astype(np.float32)
