"""The wgpu device: the runtime, and one mixin per operator family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from wgrad.wgsl.activation import ActivationOps
from wgrad.wgsl.attention import AttentionOps
from wgrad.wgsl.decoding import DecodingOps
from wgrad.wgsl.dropout import DropoutOps
from wgrad.wgsl.elementwise import ElementwiseOps
from wgrad.wgsl.embedding import EmbeddingOps
from wgrad.wgsl.linear import LinearOps
from wgrad.wgsl.loss import LossOps
from wgrad.wgsl.norm import NormOps
from wgrad.wgsl.optimizer import OptimizerOps
from wgrad.wgsl.quantize import NF4Ops
from wgrad.wgsl.rope import RopeOps
from wgrad.wgsl.runtime.adapters import list_adapters
from wgrad.wgsl.runtime.driver_caches import driver_caches
from wgrad.wgsl.runtime.dry_run import DryRun, prepare
from wgrad.wgsl.softmax import SoftmaxOps

__all__ = ["WgpuDevice", "list_adapters"]


class WgpuDevice(
    LossOps,
    AttentionOps,
    NormOps,
    ActivationOps,
    RopeOps,
    SoftmaxOps,
    ElementwiseOps,
    DropoutOps,
    EmbeddingOps,
    NF4Ops,
    LinearOps,
    OptimizerOps,
    DecodingOps,
):
    """Every operator of the contract (device/contract.py), in WGSL through wgpu.

    spec: None (best adapter), an index or a part of an adapter's name. max_binding_bytes lowers the device's own limit,
    so that tests reach the paths for arrays larger than one binding.
    """

    def dry_run(self) -> DryRunDevice:
        """A device that only notes what this one would launch, and what memory that takes; see dry_run.py."""
        return DryRunDevice(self)

    def kernel_caches(self) -> list[Path]:
        """Folders in which a driver may keep compiled shaders; see driver_caches.py."""
        return driver_caches()

    def prepare(self, dry: DryRunDevice, progress: Callable[[int, int], None] | None = None) -> int:
        """Compile what the work on `dry` needs; see the contract."""
        return prepare(self, dry, progress)


class DryRunDevice(DryRun, WgpuDevice):
    """Every operator, on a device where nothing runs."""
