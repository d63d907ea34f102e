"""What checkpointed stretches keep for their backward, parked in main memory.

Copies are part of the device's work, in its one order, so a recording has them and the host waits for none. Beside the
work they can run as far as nothing next to them touches the same array: an array leaves when its stretch has read it
for the last time, its memory on the device is used again one stretch later, and it comes back one stretch before it is
asked for. Whether a card then computes and copies at once is its driver's matter.
"""

from __future__ import annotations

from collections.abc import Sequence

from wgrad.device.contract import Array, Device


class _Parked:
    def __init__(self, arrays: Sequence[Array], device: Device) -> None:
        self.here: list[Array] | None = list(arrays)
        self.host = [device.empty_host(array.shape, array.dtype) for array in arrays]
        for array, host in zip(arrays, self.host):
            device.transfer(array, host)

    def bring(self, device: Device) -> None:
        if self.here is None:
            self.here = [device.empty(host.shape, host.dtype) for host in self.host]
            for host, array in zip(self.host, self.here):
                device.transfer(host, array)


class Parking:
    """Of one pass: stretches put theirs in the order of the forward and take them in that of the backward."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._parked: list[_Parked] = []

    def put(self, arrays: Sequence[Array]) -> int:
        """Copy to main memory what a stretch has been given, when its forward is done. -> what to ask for it with."""
        if self._parked:
            self._parked[-1].here = None
        self._parked.append(_Parked(arrays, self._device))
        return len(self._parked) - 1

    def take(self, index: int) -> list[Array]:
        """Those arrays on the device, once; the ones of the stretch before begin to come as well."""
        parked = self._parked[index]
        parked.bring(self._device)
        arrays, parked.here, parked.host = parked.here, None, []
        assert arrays is not None
        if index:
            self._parked[index - 1].bring(self._device)
        return arrays
