"""The random generator for new Tensors and for seeds of dropout: NumPy's, with the same numbers on every device."""

from __future__ import annotations

import numpy as np

from wgrad.autograd.host_arrays import to_device
from wgrad.device.contract import Array, Device

_generator = [np.random.default_rng(0)]


def manual_seed(seed: int) -> None:
    """Seed the random numbers of `randn`, `rand`, `randint` and `dropout`, which are the same on every device.

    Args:
        seed: A whole number, 0 or more.
    """
    _generator[0] = np.random.default_rng(seed)


def generator() -> np.random.Generator:
    """Return the generator that `manual_seed` seeds."""
    return _generator[0]


def drawn_seed(device: Device) -> Array:
    """Return a random seed for dropout, uint32 [2]."""
    return to_device("dropout", generator().integers(0, 1 << 32, 2, np.uint32), device)
