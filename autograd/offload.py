"""Offloading of checkpointed activations to host memory.

Copies are part of the device's work, in its one order, so a recording has them and the host waits for none. Beside the
work they can run as far as nothing next to them touches the same array: an array leaves when its stretch has read it
for the last time, its memory on the device is used again one stretch later, and it comes back one stretch before it is
asked for. Whether a card then computes and copies at once is its driver's matter.

Most is kept when the forward ends, and nearly as much while the last stretches are recomputed. What the first stretches
keep is asked for last, so offloading it takes as much off that peak as offloading any other's, and later ones may stay.
"""

from __future__ import annotations

from collections.abc import Sequence

from wgrad.device.contract import Array, Device


class _Kept:
    """Activations of one checkpointed stretch. host: empty where they stay on the device."""

    def __init__(self, arrays: Sequence[Array], device: Device, offloaded: bool) -> None:
        self.here: list[Array] | None = list(arrays)
        self.host = [device.empty_host(array.shape, array.dtype) for array in arrays] if offloaded else []
        for array, host in zip(arrays, self.host):
            device.transfer(array, host)

    def leave(self) -> None:
        if self.host:
            self.here = None

    def bring(self, device: Device) -> None:
        if self.here is None:
            self.here = [device.empty(host.shape, host.dtype) for host in self.host]
            for host, array in zip(self.host, self.here):
                device.transfer(host, array)


class Offloading:
    """Offloaded activations of one pass: stretches put theirs in the order of the forward and take them in that of the
    backward. The first `stretches` of them have it offloaded, of the others it stays on the device."""

    def __init__(self, device: Device, stretches: int) -> None:
        self._device, self._stretches = device, stretches
        self._kept: list[_Kept] = []

    def put(self, arrays: Sequence[Array]) -> int:
        """Keep what a stretch has been given, when its forward is done. -> what to ask for it with."""
        if self._kept:
            self._kept[-1].leave()
        self._kept.append(_Kept(arrays, self._device, len(self._kept) < self._stretches))
        return len(self._kept) - 1

    def leave_last(self) -> None:
        """Let go of the last stretch's activations, when the forward has gone on behind it."""
        for kept in self._kept[-1:]:  # of a pass without gradient there is none
            kept.leave()

    def bring_last(self) -> None:
        """Have the last stretch's activations begin to come, before the backward is there."""
        self._kept[-1].bring(self._device)

    def take(self, index: int) -> list[Array]:
        """Those arrays on the device, once; the ones of the stretch before begin to come as well."""
        kept = self._kept[index]
        kept.bring(self._device)
        arrays, kept.here, kept.host = kept.here, None, []
        assert arrays is not None
        if index:
            self._kept[index - 1].bring(self._device)
        return arrays
