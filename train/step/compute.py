"""The type of activations of a run: what `--compute` says, or with `auto` what the device is fastest in."""

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
    """dtype: float32, float16 or bfloat16. lines: what is said of it at the begin of a run."""

    dtype: ComputeType
    lines: list[str] = field(default_factory=list)


def choose_compute(asked: ComputeType, device: Device, *, resumed: bool = False) -> Compute:
    """The type for --compute `asked` on a device. resumed: it is the type of a run that goes on, which it keeps.

    WgradError where the device cannot compute in it.
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
    """Have a device do what --int8-matmul says; -> what is said of it. WgradError where it cannot, or need not."""
    if not config.int8_matmul or config.full:
        return []
    try:
        device.round_products()
    except DeviceError as error:
        raise WgradError(f"--int8-matmul: {error}: leave it out") from None
    return ["matmuls: frozen weights, and what they are multiplied with, are rounded to 8 bits (--int8-matmul)"]


def compute_type(asked: ComputeType, device: Device, *, resumed: bool = False) -> ComputeType:
    """Return the choice of `choose_compute`, without printing."""
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
    """Return the type that all ranks use, from each rank's choice under --compute auto: one loss scale holds for
    all."""
    if len(set(of_ranks)) == 1:
        return chosen
    return Compute("float32", ["compute: float32 (the devices of the ranks differ in what they are fastest in)"])
