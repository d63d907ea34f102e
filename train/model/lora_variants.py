"""Variants of LoRA from outside of the package: additional trained tensors, and how they change A and B."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from wgrad.autograd.modes import without_reading
from wgrad.autograd.tensor import Tensor
from wgrad.device.errors import WgradError
from wgrad.device.shown import short

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
    if not isinstance(name, str) or not name.isidentifier():
        raise WgradError(f"register_lora_variant: the name must be a word; got {short(name)}")
    if name in VARIANTS:
        raise WgradError(f"register_lora_variant: a variant is called {name} already; take another name")
    if not isinstance(variant, LoraVariant):
        raise WgradError(f"register_lora_variant: {name} must be a LoraVariant; got {variant!r}"[:300])
    if type(variant).factors is LoraVariant.factors:
        raise WgradError(f"register_lora_variant: {type(variant).__name__} has no method factors: write it")
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


def factors_of(variant: LoraVariant, a: Tensor, b: Tensor, own: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return A' and B' of a module. WgradError: the variant returns something else, or reads values."""
    where = f"--lora-variant: factors of {type(variant).__name__}"
    with without_reading(where):
        found: Any = variant.factors(a, b, own)
    if not isinstance(found, tuple | list) or len(found) != 2 or not all(isinstance(x, Tensor) for x in found):
        raise WgradError(f"{where} must return two Tensors, A' and B'; got {type(found).__name__}")
    shapes = [list(x.shape) for x in found]
    if any(x.ndim != 2 or x.dtype != np.float32 for x in found) or (
        shapes[0][1] != a.shape[1] or shapes[1] != [b.shape[0], shapes[0][0]]
    ):
        raise WgradError(
            f"{where} must return A' [r, {a.shape[1]}] and B' [{b.shape[0]}, r] in float32; got {found[0].dtype} "
            f"{shapes[0]} and {found[1].dtype} {shapes[1]}"
        )
    return found[0], found[1]


def starts(name: str, rank: int, out: int, width: int) -> dict[str, np.ndarray]:
    """Return the start values of a variant's tensors for one module, by the ends of their names.

    Raises:
        WgradError: The variant is not registered, or its `start` returns something else than arrays by name.
    """
    given: Mapping[str, Any] = variant_of(name, "--lora-variant").start(rank, out, width)
    if not isinstance(given, Mapping):
        raise WgradError(f"--lora-variant: start of {name} must return a dict of arrays; got {type(given).__name__}")
    for own, value in given.items():
        if not (isinstance(own, str) and own.isidentifier()):
            raise WgradError(f"--lora-variant: start of {name} must name its arrays by words; got {short(own)}")
        if not (
            isinstance(value, np.ndarray) and value.size and value.dtype.kind in "biuf" and np.isfinite(value).all()
        ):
            raise WgradError(
                f"--lora-variant: start of {name} must return finite NumPy arrays; got {own}: {short(value)}"
            )
    return {f"{OWN}{own}": np.asarray(value, np.float32) for own, value in given.items()}
