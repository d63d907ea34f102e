"""The flat gradient in buckets: stretches of layers, each of which is complete while the backward has more to do."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from wgrad.train.run.optim import FlatParameters

BUCKET_BYTES = 8 << 20  # smaller ones would pay more in latency than they hide
MOST = 8
_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True)
class Bucket:
    """Elements begin ... end of the flat gradient, complete once the backward has passed the input of `layer`."""

    layer: int
    begin: int
    end: int


def buckets_of(parameters: FlatParameters) -> list[Bucket]:
    """In the order in which they become complete, the last one at the end of the backward (layer 0).

    One for all where parameters do not lie layer by layer, as with --full.
    """
    whole = [Bucket(0, 0, parameters.size)]
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for name, (begin, end) in parameters.places().items():
        found = _LAYER.search(name)
        if found is None:
            return whole
        layer = int(found[1])
        first[layer], last[layer] = min(first.get(layer, begin), begin), max(last.get(layer, end), end)
    layers = sorted(first)
    if any(last[a] > first[b] for a, b in zip(layers, layers[1:])):
        return whole
    count = max(min(MOST, parameters.size * 4 // BUCKET_BYTES, len(layers)), 1)
    starts = [layers[math.ceil(len(layers) * part / count)] for part in range(count)]
    begins = [0, *(first[layer] for layer in starts[1:])]
    ends = [*begins[1:], parameters.size]
    buckets = [Bucket(layer, begin, end) for layer, begin, end in zip([0, *starts[1:]], begins, ends)]
    return buckets[::-1]
