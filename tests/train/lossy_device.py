"""The device `cpu` behind a front that is lost at chosen calls, and can be opened again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.errors import DeviceLost

# Asked of the host alone.
_SAFE = {
    "reopen",
    "free_memory",
    "memory",
    "host_memory",
    "dry_run",
    "turn_off",
    "trying_without",
    "kernel_caches",
    "reset_peak",
}


class Front:
    """Counts the calls of a device, and loses it.

    gaps: calls between a loss and the next. reopens: as of a device. losses: how many there were, by the name of the
    call.
    """

    def __init__(self, gaps: Iterable[int] = (), reopens: bool = True) -> None:
        self._gaps, self.reopens = iter(gaps), reopens
        self.calls = 0
        self.losses: Counter[str] = Counter()
        self.shares: list[int] = []
        self._next()

    def _next(self) -> None:
        gap = next(self._gaps, None)
        self._at = None if gap is None else self.calls + gap

    def call(self, name: str) -> bool:
        """Return whether the device is lost in this call."""
        self.calls += 1
        if self._at is None or self.calls <= self._at:
            return False
        self.losses[name] += 1
        self._next()
        return True

    def device(self) -> Any:
        return LossyDevice(self)


class LossyDevice(ReferenceDevice):
    def __init__(self, front: Front) -> None:
        super().__init__()
        self.front, self.lost, self.closed = front, False, False
        self.reopens, self.needs_new_process = front.reopens, not front.reopens

    def reopen(self, losses: int) -> Any:
        assert self.lost and not self.closed
        self.closed = True
        self.front.shares.append(losses)
        return self.front.device()


def _counted(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        self.lost = self.lost or self.front.call(name)
        if self.lost:
            raise DeviceLost(f"the device was lost while doing {name} (launches in flight: {name}): as planned")
        return plain(self, *arguments, **options)

    return call


for _name in dir(ReferenceDevice):
    _plain = getattr(ReferenceDevice, _name)
    _is_property = isinstance(ReferenceDevice.__dict__.get(_name), property)
    if not _name.startswith("_") and callable(_plain) and not _is_property and _name not in _SAFE:
        setattr(LossyDevice, _name, _counted(_name, _plain))
