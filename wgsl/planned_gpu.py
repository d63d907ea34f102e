"""An absent GPU: `wgrad plan` on a machine without one uses the kernels that most GPUs get."""

from __future__ import annotations

from typing import Any

from wgrad.wgsl.runtime.adapters import HOST_BUFFERS
from wgrad.wgsl.webgpu_trace import PROFILES, TraceDevice

_BINDING_BYTES, _BUFFER_BYTES = (2 << 30) - 4, (4 << 30) - 4  # what AMD's, Intel's and NVIDIA's drivers allow


class PlannedGpu(TraceDevice):
    """A discrete GPU without tensor cores, whose memory and rates are unknown."""

    def __init__(self) -> None:
        super().__init__(PROFILES[1])
        self.description = "a GPU that is not here"
        self.facts: dict[str, Any] = {"name": self.description, "type": "elsewhere", "features": (HOST_BUFFERS,)}
        self.max_binding_bytes, self.max_buffer_bytes = _BINDING_BYTES, _BUFFER_BYTES
        self.host_buffers = True

    def free_memory(self) -> int | None:
        """Return None: unknown."""
        return None
