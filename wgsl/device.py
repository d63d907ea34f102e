"""The wgpu device: the runtime, and one mixin per operator family."""

from __future__ import annotations

from wgrad.wgsl.adapters import list_adapters
from wgrad.wgsl.attention import AttentionOps
from wgrad.wgsl.loss import LossOps
from wgrad.wgsl.runtime import Runtime

__all__ = ["WgpuDevice", "list_adapters"]


class WgpuDevice(AttentionOps, LossOps, Runtime):
    """Every operator of the contract (autograd/device.py), in WGSL through wgpu.

    spec: None (best adapter), an index or a part of an adapter's name. max_binding_bytes lowers the device's own limit,
    so that tests reach the paths for arrays larger than one binding.
    """
