"""The dry run (device/dry_run.py): which kernels a piece of work launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wgrad.device.dry_run import DryRuntime
from wgrad.hip.runtime.runtime import Runtime


class DryRun(DryRuntime, Runtime):
    """A `Runtime` that makes the same calls as `device` without running anything. Its arrays belong to it alone.

    kernels: (source, kernel) of each kernel launched, in the order of first use. Downloads give zeros. As on `device`,
    a launch raises TooLarge if its grid is beyond the limits.
    """

    def __init__(self, device: Any) -> None:
        super().__init__(exact_blocks=device._pool._exact)
        self.architecture, self.gpu, self.wave = device.architecture, device.gpu, device.wave
        self.compute_units, self.modules, self.description = device.compute_units, device.modules, device.description
        self.float16 = self.bfloat16 = True
        self.shared_memory = device.shared_memory
        self.attention_rounding = device.attention_rounding
        self.kernels: dict[tuple[str, str], None] = {}

    @property
    def launched(self) -> list[tuple[str, str, tuple[Any, ...]]]:
        return [(source, kernel, ()) for source, kernel in self.kernels]

    def launch(
        self,
        source: str,
        kernel: str,
        arguments: Sequence[Any],
        grid: tuple[int, int, int],
        *,
        threads: int = 256,
        work: float = 0.0,
    ) -> None:
        self._check_grid(kernel, grid, threads)
        self.kernels[source, kernel] = None
