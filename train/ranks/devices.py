"""Assign devices to ranks: one GPU for each rank of a host, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.device.shown import counted
from wgrad.device.whole_numbers import whole_number

SOFTWARE = "CPU"  # the adapter type of a software Vulkan driver


def device_of_rank(spec: str, rank: int, size: int, devices: Callable[[], Sequence[dict[str, Any]]]) -> str:
    """Return the device of a rank, as `select_device` takes it.

    Args:
        spec: --device: one device for all ranks, or a list with one for each.
        rank: Number of the rank on this host.
        size: Ranks on this host.
        devices: `list_devices`.

    Raises:
        WgradError: There are more ranks than devices.
    """
    listed = [name.strip() for name in spec.split(",")]
    if len(listed) > 1:
        if len(listed) < size:
            raise WgradError(
                f"--device: {spec} names {len(listed)} devices, and {size} ranks run on this host: name one for each, "
                "or start fewer ranks"
            )
        return listed[rank]
    kind, _, part = spec.partition(":")
    if size == 1 or kind not in ("auto", "hip", "wgpu"):
        return spec
    # `auto` uses AMD GPUs through wgpu too: HIP would list them a second time, and ranks do not run its self-check.
    prefix = "hip:" if kind == "hip" else "wgpu:"
    cards = [d for d in devices() if d["spec"].startswith(prefix) and d["usable"] and d.get("type") != SOFTWARE]
    if part:
        named = whole_number(part) is None
        cards = [d for d in cards if d["spec"] == spec or (named and part.lower() in d["name"].lower())]
    if not cards:  # a software driver, or NumPy: both use the CPU, which ranks may share
        return spec
    if len(cards) < size:
        names = ", ".join(f"{d['spec']} {d['name']}" for d in cards)
        raise WgradError(
            f"--device {spec}: {size} ranks run on this host, and it has {counted(len(cards), 'such GPU')} ({names}): "
            "start fewer ranks, or name a device for each (--device wgpu:0,cpu; "
            "wgpu:0,wgpu:0 where each rank sees a GPU of its own)"
        )
    return str(cards[rank]["spec"])
