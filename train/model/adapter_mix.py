"""Several adapters of one base model in a batch, each for its own sequences.

The A of all adapters are stacked and their B lie side by side, so that one pair of products serves all sequences. In
between, the columns of adapters other than a sequence's own are multiplied by 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Device
from wgrad.train.model.lora import Adapter, LoraConfig, LoraModule, is_whole

MOST_RANKS = 256  # sum of the ranks of a batch's adapters: each sequence computes all of them
Loaded = tuple[LoraConfig, Mapping[str, np.ndarray]]  # result of `load_adapter`


def can_mix(lora: LoraConfig, values: Mapping[str, np.ndarray]) -> bool:
    """Return whether an adapter has only A and B of projections: no DoRA, no whole weights, no experts."""
    plain = not (lora.dora or lora.variant or lora.target_parameters)
    return plain and not any(map(is_whole, values))


def first_that_mix(adapters: Mapping[str, Loaded]) -> list[str]:
    """Return the names of the first adapters that can share a batch, as many as MOST_RANKS allows."""
    found, ranks = list[str](), 0
    for name, (lora, values) in adapters.items():
        rank = max((v.shape[0] for n, v in values.items() if n.endswith(".lora_A")), default=0)
        if can_mix(lora, values) and ranks + rank <= MOST_RANKS:
            found.append(name)
            ranks += rank
    return found


def mix(adapters: Sequence[Loaded], device: Device) -> Adapter:
    """Combine adapters into one; `shares_of_rows` selects each sequence's own by its index, or none by -1."""
    names = dict.fromkeys(n.removesuffix(".lora_A") for _, values in adapters for n in values if n.endswith(".lora_A"))
    modules = dict[str, LoraModule]()
    for stream, name in enumerate(names):
        own = [(n, lora, v) for n, (lora, v) in enumerate(adapters) if name + ".lora_A" in v]
        a = np.concatenate([values[name + ".lora_A"] for _, _, values in own])
        b = np.concatenate([values[name + ".lora_B"] * np.float32(lora.scaling_of(name)) for _, lora, values in own], 1)
        shares = tuple((n, values[name + ".lora_A"].shape[0]) for n, _, values in own)
        left, right = (Tensor(device.upload(np.ascontiguousarray(x, np.float32)), device) for x in (a, b))
        modules[name] = LoraModule(left, right, 1.0, stream, shares=shares)
    return Adapter(LoraConfig(r=1, alpha=1.0), modules)


def shares_of_rows(shares: Iterable[tuple[int, int]], adapters: np.ndarray) -> np.ndarray:
    """Return float32 [N, R]: 1 if a column of x A^T belongs to the row's adapter, else 0.

    Args:
        shares: Index and rank of each adapter.
        adapters: Index of each row's adapter, int32 [N]; -1: none.
    """
    columns = np.concatenate([np.full(rank, number) for number, rank in shares])
    own: np.ndarray = adapters[:, None] == columns
    return own.astype(np.float32)
