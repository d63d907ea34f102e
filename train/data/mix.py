"""Several sources of training data with weights: the examples that an epoch takes of each.

With N examples in all, an epoch takes N w / (sum of weights) of a source with weight w. Each example of a source is
used once, in a random order, before any is repeated, also across epochs. So the examples of an epoch depend on seed and
epoch alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wgrad.train.options.data_sources import STDIN, Source

MOST_EPOCHS = 100  # whose steps are counted ahead; their numbers of rows differ
_LAST_WORD = 3  # makes these generators differ from those that split the data, order the epochs and draw evaluations


@dataclass(frozen=True)
class Mix:
    """counts: number of examples of each source, which are concatenated; weights: one for each source."""

    counts: tuple[int, ...]
    weights: tuple[float, ...]

    def shares(self) -> list[int]:
        """Return the number of examples that an epoch takes of each source."""
        return [max(1, round(sum(self.counts) * weight / sum(self.weights))) for weight in self.weights]

    def epoch(self, seed: int, epoch: int) -> np.ndarray:
        """Return the indices of the examples of an epoch, source by source."""
        chosen, first = [], 0
        for source, (count, share) in enumerate(zip(self.counts, self.shares())):
            begin, end = epoch * share, (epoch + 1) * share
            rounds = range(begin // count, -(-end // count))
            turns = np.concatenate([_turn(seed, number, source, count) for number in rounds])
            chosen.append(first + turns[begin - rounds[0] * count : end - rounds[0] * count])
            first += count
        return np.concatenate(chosen)


def _turn(seed: int, number: int, source: int, count: int) -> np.ndarray:
    """Return the order of a source's examples in its `number`-th pass."""
    return np.random.Generator(np.random.PCG64([seed, number, _LAST_WORD, source])).permutation(count)


def describe(sources: Sequence[Source], counts: Sequence[int], tokens: Sequence[int], mix: Mix | None) -> str:
    """Return a line for the user. counts, tokens: number of training examples of each source, and of their tokens."""
    shares = mix.shares() if mix is not None else list(counts)
    weighed = [share / count * total for share, count, total in zip(shares, counts, tokens)]
    parts = []
    for source, count, share, part in zip(sources, counts, shares, weighed):
        times = f", weight {source.weight:g}: each {share / count:.3g} times an epoch" if mix is not None else ""
        name = "standard input" if source.path == STDIN else source.path
        of_all = f"{100 * share / sum(shares):.1f} % of the examples, {100 * part / sum(weighed):.1f} % of the tokens"
        parts.append(f"{name} {of_all} ({count}{times})")
    return f"sources: {'; '.join(parts)}"
