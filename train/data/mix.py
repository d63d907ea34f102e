"""Several sources of training data with weights: what an epoch has of each.

Of N examples in all, an epoch has N w / (sum of weights) of a source with weight w. A source gives its examples in
turn: each once, in an order of its own, before any comes again, also across epochs. So what an epoch has is a function
of seed and epoch alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wgrad.train.options.data_sources import STDIN, Source

MOST_EPOCHS = 100  # that are counted ahead: each has a number of rows of its own
_LAST_WORD = 3  # tells these generators from those that split the data, order the epochs and draw what is measured


@dataclass(frozen=True)
class Mix:
    """counts: examples of each source, which lie one source behind the other; weights: as many."""

    counts: tuple[int, ...]
    weights: tuple[float, ...]

    def shares(self) -> list[int]:
        """Examples that an epoch has of each source."""
        return [max(1, round(sum(self.counts) * weight / sum(self.weights))) for weight in self.weights]

    def epoch(self, seed: int, epoch: int) -> np.ndarray:
        """Numbers of the examples that an epoch has, source by source."""
        chosen, first = [], 0
        for source, (count, share) in enumerate(zip(self.counts, self.shares())):
            begin, end = epoch * share, (epoch + 1) * share
            rounds = range(begin // count, -(-end // count))
            turns = np.concatenate([_turn(seed, number, source, count) for number in rounds])
            chosen.append(first + turns[begin - rounds[0] * count : end - rounds[0] * count])
            first += count
        return np.concatenate(chosen)


def _turn(seed: int, number: int, source: int, count: int) -> np.ndarray:
    """All examples of a source in the order in which they come for the `number`-th time."""
    return np.random.Generator(np.random.PCG64([seed, number, _LAST_WORD, source])).permutation(count)


def describe(sources: Sequence[Source], counts: Sequence[int], tokens: Sequence[int], mix: Mix | None) -> str:
    """One line for people. counts, tokens: of each source's training examples."""
    shares = mix.shares() if mix is not None else list(counts)
    weighed = [share / count * total for share, count, total in zip(shares, counts, tokens)]
    parts = []
    for source, count, share, part in zip(sources, counts, shares, weighed):
        times = f", weight {source.weight:g}: each {share / count:.3g} times an epoch" if mix is not None else ""
        name = "standard input" if source.path == STDIN else source.path
        of_all = f"{100 * share / sum(shares):.1f} % of the examples, {100 * part / sum(weighed):.1f} % of the tokens"
        parts.append(f"{name} {of_all} ({count}{times})")
    return f"sources: {'; '.join(parts)}"
