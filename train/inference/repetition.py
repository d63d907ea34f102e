"""The repetition penalty: tokens that a text already contains become less likely.

Source: Keskar et al., CTRL (2019).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wgrad.device.contract import Array, Device
from wgrad.device.expression import Program, row_major

# old: a logit. Array 0: its factor. A positive logit is divided by it, a negative one multiplied.
_PENALIZED: Program = (
    *(("old",), ("load", 0), ("scalar", 0)),
    *(("gt", 0, 2), ("div", 0, 1), ("mul", 0, 1), ("where", 3, 4, 5)),
)


class Repetition:
    """Factors of the logits for the tokens of a text, including its prompt."""

    def __init__(self, penalty: float, vocab_size: int, prompt: Sequence[int]) -> None:
        self._penalty = penalty
        self._factors = np.ones(vocab_size, np.float32)
        self._factors[np.asarray(prompt, np.int64)] = penalty
        self._seen = set(prompt)
        self._count = 0

    def factors(self, drawn: Sequence[int]) -> np.ndarray:
        """Return float32 [V], the same array as before if no token is new. drawn: all tokens after the prompt."""
        new = set(drawn[self._count :]) - self._seen
        self._count = len(drawn)
        if new:
            self._seen |= new
            self._factors = self._factors.copy()
            self._factors[list(new)] = self._penalty
        return self._factors


def penalize(device: Device, logits: Array, factors: Array) -> None:
    """Change logits float32 [R, V] by factors of the same shape, in place."""
    shape = tuple(logits.shape)
    device.fused(_PENALIZED, (factors,), ((row_major(shape), 0),), (0.0,), shape, out=logits)
