"""Dtype of a run's activations: that of --compute, or with `auto` the device's fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from wgrad.autograd.matrix_units import idle
from wgrad.device.contract import Device
from wgrad.device.errors import DeviceError, WgradError
from wgrad.train.options.choices import AUTO, ComputeType
from wgrad.train.options.finetune_config import RunOptions

_REASONS = {
    "bfloat16": "the GPU's matrix cores take it, and it needs no loss scale",
    "float16": "the GPU's tensor cores take it; with loss scaling",
    "float32": "no tensor cores are in use on this device",
}


@dataclass(frozen=True)
class Compute:
    """Dtype of activations, and the lines about it that a run prints."""

    dtype: ComputeType
    lines: list[str] = field(default_factory=list)


def choose_compute(asked: ComputeType, device: Device, *, resumed: bool = False) -> Compute:
    """Choose the dtype of activations on a device.

    Args:
        asked: Value of --compute.
        device: Device of the run.
        resumed: Whether the run is resumed; it keeps the dtype that it was begun with.

    Raises:
        WgradError: The device cannot compute in that dtype.
    """
    chosen, unused = compute_type(asked, device, resumed=resumed), idle(device)
    if asked == AUTO:
        return Compute(chosen, [f"compute: {chosen} ({unused or _REASONS[chosen]})"])
    if not resumed:
        return Compute(asked, [f"note: {unused}"] if unused else [])
    lines = [f"compute: {asked}, as the run was begun"]
    if asked != device.fastest_compute:
        lines.append(f"note: a new run would take {device.fastest_compute} on this device; one that goes on keeps its")
    return Compute(asked, lines)


def round_products(config: RunOptions, device: Device) -> list[str]:
    """Switch a device to --int8-matmul and return the lines to print. WgradError: it cannot, or gains nothing."""
    if not config.int8_matmul or config.full:
        return []
    try:
        device.round_products()
    except DeviceError as error:
        raise WgradError(f"--int8-matmul: {error}: leave it out") from None
    return ["matmuls: frozen weights, and what they are multiplied with, are rounded to 8 bits (--int8-matmul)"]


def compute_type(asked: ComputeType, device: Device, *, resumed: bool = False) -> ComputeType:
    """Return the dtype of `choose_compute` alone."""
    if asked == AUTO:
        return cast(ComputeType, device.fastest_compute)
    if asked == "float32" or getattr(device, asked):
        return asked
    if resumed:
        raise WgradError(
            f"--resume: the run was begun with --compute {asked}, which {device.description} cannot: go on with a "
            "--device that can, or begin anew in another --out"
        )
    if asked == "float16":
        raise WgradError(f"--compute float16: {device.description} has no shader-f16: use --compute float32")
    raise WgradError(
        f"--compute bfloat16: {device.description} cannot: use --compute float16 or float32, or --device hip"
    )


def common_compute(chosen: Compute, of_ranks: Sequence[str]) -> Compute:
    """Return the dtype that all ranks use under --compute auto, because they share one loss scale.

    chosen: choice of this rank. of_ranks: dtype that each rank chose.
    """
    if len(set(of_ranks)) == 1:
        return chosen
    return Compute("float32", ["compute: float32 (the devices of the ranks differ in what they are fastest in)"])
