"""Variants of LoRA from outside of the package: additional trained tensors, and how they change A and B."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from wgrad.autograd.tensor import Tensor
from wgrad.device.errors import WgradError

OWN = ".lora_variant_"  # between a module and the name of a variant's tensor


class LoraVariant:
    """A variant of LoRA. Inherit from it, and register an object with `register_lora_variant`.

    A projection computes W x + scaling * B' (A' x), with the scaling of plain LoRA.
    """

    def start(self, rank: int, out: int, width: int) -> Mapping[str, np.ndarray]:
        """Return float32 start values by name of the tensors trained in addition to A [rank, width] and B [out, rank].

        A starts at random and B at 0, as in plain LoRA.
        """
        return {}

    def factors(self, a: Tensor, b: Tensor, own: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return A' [r, width] and B' [out, r], float32, computed from the trained tensors with operators of Tensor.

        The device records the operators once and replays them, so they must not depend on values that are read back.
        """
        raise NotImplementedError


VARIANTS: dict[str, LoraVariant] = {}


def register_lora_variant(name: str, variant: LoraVariant) -> None:
    """Register a variant of LoRA, for `finetune(lora_variant=name)` and for loading adapters trained with it.

    Args:
        name: Name of the variant, which is stored with adapters.
        variant: Its implementation.

    Raises:
        WgradError: The name is not an identifier or is taken, or the variant is not a LoraVariant.
    """
    if not name.isidentifier():
        raise WgradError(f"register_lora_variant: the name must be a word; got {name[:100]!r}")
    if name in VARIANTS:
        raise WgradError(f"register_lora_variant: a variant is called {name} already; take another name")
    if not isinstance(variant, LoraVariant):
        raise WgradError(f"register_lora_variant: {name} must be a LoraVariant; got {variant!r}"[:300])
    VARIANTS[name] = variant


def variant_of(name: str, source: str) -> LoraVariant:
    """Return the variant with a name.

    Raises:
        WgradError: It is not registered. `source` begins the message.
    """
    if name not in VARIANTS:
        raise WgradError(
            f"{source}: the LoRA variant {name[:100]!r} is not registered: call wgrad.register_lora_variant before, in "
            "the same program"
        )
    return VARIANTS[name]


def starts(name: str, rank: int, out: int, width: int) -> dict[str, np.ndarray]:
    """Return the start values of a variant's tensors for one module, by the ends of their names.

    Raises:
        WgradError: The variant is not registered, or its `start` returns something else than arrays by name.
    """
    given: Mapping[str, Any] = variant_of(name, "--lora-variant").start(rank, out, width)
    for own, value in given.items():
        if not (isinstance(own, str) and own.isidentifier() and isinstance(value, np.ndarray) and value.size):
            raise WgradError(f"--lora-variant: start of {name} must return arrays by names that are words; got {own!r}")
    return {f"{OWN}{own}": np.asarray(value, np.float32) for own, value in given.items()}
