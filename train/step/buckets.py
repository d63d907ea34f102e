"""Buckets of the flat gradient: consecutive layers that are summed over ranks while the backward continues."""

from __future__ import annotations

import re
from dataclasses import dataclass

from wgrad.train.step.optim import FlatParameters

# Only the transfer of the last bucket is not hidden behind the backward, so it is small. Each earlier one is twice as
# large as the next, up to BUCKET_BYTES: small buckets everywhere would cost more in overhead than they hide.
LAST_BYTES = 1 << 20
BUCKET_BYTES = 8 << 20
SHARE = 8  # a large gradient has buckets of up to 1 / SHARE of its bytes instead
_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True)
class Bucket:
    """Elements begin ... end of the flat gradient, complete once the backward has passed the input of `layer`."""

    layer: int
    begin: int
    end: int


def buckets_of(parameters: FlatParameters) -> list[Bucket]:
    """Return the buckets in the order in which the backward completes them, layer 0 last.

    There is only one if the parameters do not lie layer by layer, as with --full.
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
    largest = max(BUCKET_BYTES, parameters.size * 4 // SHARE)
    buckets, begin, begun, wanted = list[Bucket](), 0, 0, min(LAST_BYTES, largest)
    for following in [*layers[1:], None]:
        end = parameters.size if following is None else first[following]
        if (end - begin) * 4 >= wanted or following is None:
            buckets.append(Bucket(begun, begin, end))
            begin, begun, wanted = end, following or 0, min(2 * wanted, largest)
    return buckets[::-1]
