"""Uniform buffers for the parameters of launches."""

from __future__ import annotations

from typing import Any

_SLOT = 256
_SLOTS = 1024  # of a buffer


class Uniforms:
    """Uniforms by content. Parameters repeat from step to step, so contents are kept and never overwritten."""

    def __init__(self, device: Any, queue: Any) -> None:
        self._device, self._queue = device, queue
        self._places: dict[bytes, tuple[Any, int]] = {}
        self._buffer: Any = None

    def binding(self, packed: bytes) -> dict[str, Any]:
        """Return a uniform with this content, as a bind group takes it."""
        packed = packed.ljust(16, b"\0")
        if packed not in self._places:
            at = len(self._places) % _SLOTS
            if at == 0:
                self._buffer = self._device.create_buffer(size=_SLOT * _SLOTS, usage="UNIFORM|COPY_DST")
            self._queue.write(self._buffer, at * _SLOT, packed)
            self._places[packed] = (self._buffer, at * _SLOT)
        buffer, offset = self._places[packed]
        return {"buffer": buffer, "offset": offset, "size": -(-len(packed) // 16) * 16}
