"""The HIP device: the runtime, and one mixin per operator family."""

from __future__ import annotations

from pathlib import Path

from wgrad.device.cache import cache_folder
from wgrad.hip.activation import ActivationOps
from wgrad.hip.attention import AttentionOps
from wgrad.hip.decoding import DecodingOps
from wgrad.hip.dropout import DropoutOps
from wgrad.hip.elementwise import ElementwiseOps
from wgrad.hip.embedding import EmbeddingOps
from wgrad.hip.gemm import GemmOps
from wgrad.hip.loss import LossOps
from wgrad.hip.norm import NormOps
from wgrad.hip.optimizer import OptimizerOps
from wgrad.hip.rope import RopeOps
from wgrad.hip.runtime.dry_run import DryRun
from wgrad.hip.softmax import SoftmaxOps

__all__ = ["HipDevice"]


class HipDevice(
    LossOps,
    GemmOps,
    AttentionOps,
    NormOps,
    ActivationOps,
    RopeOps,
    SoftmaxOps,
    ElementwiseOps,
    DropoutOps,
    EmbeddingOps,
    OptimizerOps,
    DecodingOps,
):
    """Every operator of the contract (device/contract.py), in HIP through hip-python.

    index: which card. exact_blocks: arrays get memory of just their size, for tests of accesses out of range.

    Raises:
        DeviceError: hip-python, the driver or a card is missing, or the card's architecture has no kernels.
    """

    def kernel_caches(self) -> list[Path]:
        """Where kernels are kept that hiprtc compiled; the others ship."""
        return [cache_folder("hip")]

    def dry_run(self) -> DryRunDevice:
        """A device that only notes what this one would launch, and what memory that takes; see dry_run.py."""
        return DryRunDevice(self)


class DryRunDevice(DryRun, HipDevice):
    """Every operator, on a device where nothing runs."""
