"""Offload checkpointed activations to host memory.

Copies are ordered with the device's other work, so they are part of recordings, and the host never waits for one. They
can overlap with computation, because neighboring work does not touch the same arrays. An array is copied out when its
checkpointed part has read it for the last time. Its device memory is reused one part later, and it is copied back one
part before it is needed. Whether a GPU then computes and copies at the same time depends on its driver.

Memory peaks when the forward ends, and while the last parts are recomputed. Activations of the first parts are needed
last, so offloading them reduces that peak as much as offloading any others, and those of later parts may stay.
"""

from __future__ import annotations

from collections.abc import Sequence

from wgrad.device.contract import Array, Device


class _Kept:
    """Activations of a checkpointed part.

    Attributes:
        here: The arrays on the device, None for one that is not there.
        host: Their copies in main memory, None for one that stays on the device.
    """

    def __init__(self, arrays: Sequence[Array], device: Device, stays: Sequence[bool]) -> None:
        self.here: list[Array | None] = list(arrays)
        self.host = [None if stay else device.empty_host(a.shape, a.dtype) for a, stay in zip(arrays, stays)]
        for array, host in zip(arrays, self.host):
            if host is not None:
                device.transfer(array, host)

    def leave(self) -> None:
        self.here = [array if host is None else None for array, host in zip(self.here, self.host)]

    def bring(self, device: Device) -> None:
        missing = [(i, host) for i, host in enumerate(self.host) if host is not None and self.here[i] is None]
        for i, host in missing:
            self.here[i] = device.empty(host.shape, host.dtype)
        for i, host in missing:
            device.transfer(host, self.here[i])


class Offloading:
    """Offloaded activations of one pass. Checkpointed parts put theirs in the order of the forward, and take them in
    reverse. Only those of the first `stretches` parts are offloaded."""

    def __init__(self, device: Device, stretches: int) -> None:
        self._device, self._stretches = device, stretches
        self._kept: list[_Kept] = []

    def put(self, arrays: Sequence[Array], stays: Sequence[bool] | None = None) -> int:
        """Keep activations of a part after its forward, and return the index to take them with.

        stays: Whether each of them stays on the device where others of its part are offloaded; None: none does.
        """
        if self._kept:
            self._kept[-1].leave()
        every = len(self._kept) >= self._stretches
        self._kept.append(_Kept(arrays, self._device, [every or stay for stay in stays or [False] * len(arrays)]))
        return len(self._kept) - 1

    def leave_last(self) -> None:
        """Free the device memory of the last part's activations, once the forward has passed it."""
        for kept in self._kept[-1:]:  # empty in a pass without gradient
            kept.leave()

    def bring_last(self) -> None:
        """Start to copy the last part's activations back, before the backward needs them."""
        self._kept[-1].bring(self._device)

    def take(self, index: int) -> list[Array]:
        """Return the arrays on the device, once, and start to copy back those of the previous part."""
        kept = self._kept[index]
        kept.bring(self._device)
        arrays = [array for array in kept.here if array is not None]
        kept.here, kept.host = [], []
        if index:
            self._kept[index - 1].bring(self._device)
        return arrays
