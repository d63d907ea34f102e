"""A layer's weights in main memory, on the device, or in both, for weights that are streamed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wgrad.device.contract import Device
from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.memory import ALIGN, Array

Weights = dict[str, Any]  # Array or FrozenWeight by name
_COPIED_BELOW = 1 << 20  # smaller arrays of experts, in bytes, are copied: tables, for example, are read repeatedly


def mapped(weights: Mapping[str, Any], change: Callable[[Array], Array]) -> Weights:
    """Return the weights with `change` applied to each of their arrays, in order."""
    return {n: w.map_arrays(change) if isinstance(w, FrozenWeight) else change(w) for n, w in weights.items()}


def arrays_of(weights: Mapping[str, Any]) -> list[Array]:
    """Return the arrays of weights, in order."""
    found: list[Array] = []
    mapped(weights, lambda array: found.append(array) or array)  # type: ignore[func-returns-value]
    return found


def _padded(array: Array) -> int:
    result: int = -(-array.nbytes // ALIGN) * ALIGN
    return result


def buffer_bytes(weights: Mapping[str, Any]) -> int:
    """Return the size in bytes of a buffer in which `laid_out` places such weights."""
    return max(ALIGN, sum(map(_padded, arrays_of(weights))))


def stays(layer: int, layers: int, resident: int) -> bool:
    """Return whether a layer is one of the `resident` layers that stay on the device.

    These are spread evenly from the first layer on, so that each copy has equally much work to overlap with.
    """
    streamed = layers - resident
    return (layer + 1) * streamed // layers == layer * streamed // layers


def laid_out(weights: Mapping[str, Any], buffer: Array) -> Weights:
    """Return weights with the shapes of `weights` as views of a buffer, each aligned for bindings."""
    at = 0

    def view(array: Array) -> Array:
        nonlocal at
        start, at = at, at + _padded(array)
        return Array(buffer.lease, buffer.offset + start, array.shape, array.dtype)

    return mapped(weights, view)


def read_there(there: Weights, placed: Weights) -> Weights:
    """Return weights whose large arrays are those of `there` in main memory, and small ones those of `placed`."""
    copies = iter(arrays_of(placed))
    return mapped(there, lambda array: _large(array, next(copies)))


def _large(array: Array, copy: Array) -> Array:
    return array if array.nbytes >= _COPIED_BELOW else copy


@dataclass(frozen=True)
class HostLayer:
    """A layer's weights in main memory. `weights` are views of `buffer`, uint8 [n]."""

    buffer: Array
    weights: Weights

    @property
    def host(self) -> HostLayer:
        """The part in main memory: all of it."""
        return self

    @property
    def on_device(self) -> Weights:
        """The weights on the device: none."""
        return {}

    def part_of(self, name: str) -> HostLayer | ResidentLayer:
        """Return the part of the layer that has a weight."""
        return self

    @classmethod
    def like(cls, weights: Mapping[str, Any], device: Device) -> HostLayer:
        """Allocate a layer for weights of these shapes, whose arrays may be on any device."""
        buffer = device.empty_host((buffer_bytes(weights),), np.uint8)
        return cls(buffer, laid_out(weights, buffer))

    @property
    def nbytes(self) -> int:
        """Bytes of `buffer`."""
        return int(self.buffer.nbytes)

    def spans(self, apart: Collection[str]) -> list[tuple[int, int]]:
        """Return the byte ranges of `buffer` to copy if large arrays of the weights named in `apart` are left out."""
        found: list[tuple[int, int]] = []
        for name, weight in self.weights.items():
            for array in arrays_of({name: weight}):
                begin = array.offset - self.buffer.offset
                end = begin + _padded(array)
                if name in apart and array.nbytes >= _COPIED_BELOW:
                    continue
                if found and found[-1][1] == begin:
                    begin = found.pop()[0]
                found.append((begin, end))
        return found

    def write(self, data: np.ndarray, device: Device) -> None:
        """Take the bytes of `read`, uint8 [n]."""
        device.write(self.buffer, data)

    def read(self, device: Device) -> np.ndarray:
        """Return the bytes of `buffer`."""
        data: np.ndarray = device.download(self.buffer)
        return data


@dataclass(frozen=True)
class ResidentLayer:
    """A layer's weights on the device, in separate arrays since the allocator would round one large buffer up by more.

    shapes: weights of the same shapes, whose arrays may be on any device.
    """

    shapes: Weights
    weights: Weights = field(default_factory=dict)
    host: None = None

    @property
    def on_device(self) -> Weights:
        """The weights on the device: all of them."""
        return self.weights

    def part_of(self, name: str) -> HostLayer | ResidentLayer:
        """Return the part of the layer that has a weight."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of `read`."""
        return buffer_bytes(self.shapes)

    def write(self, data: np.ndarray, device: Device) -> None:
        """Create the weights from the bytes of a `HostLayer` with the same weights."""
        at = 0

        def placed(array: Array) -> Array:
            nonlocal at
            start, at = at, at + _padded(array)
            made: Array = device.empty(array.shape, array.dtype)
            device.write(made, data[start : start + array.nbytes].view(array.dtype).reshape(array.shape))
            return made

        self.weights.update(mapped(self.shapes, placed))

    def read(self, device: Device) -> np.ndarray:
        """Return the bytes that a `HostLayer` with the same weights would have."""
        data, at = np.zeros(self.nbytes, np.uint8), 0
        for array in arrays_of(self.weights):
            data[at : at + array.nbytes] = device.download(array).reshape(-1).view(np.uint8)
            at += _padded(array)
        return data


@dataclass(frozen=True)
class SplitLayer:
    """A layer whose experts are in main memory, and whose other weights are on the device.

    names: names of all its weights, in order.
    """

    host: HostLayer
    resident: ResidentLayer
    names: tuple[str, ...]

    @classmethod
    def like(cls, weights: Mapping[str, Any], experts: Collection[str], device: Device) -> SplitLayer:
        """Allocate a layer for weights of these shapes, whose arrays may be on any device."""
        host = HostLayer.like({name: w for name, w in weights.items() if name in experts}, device)
        return cls(host, ResidentLayer({n: w for n, w in weights.items() if n not in experts}), tuple(weights))

    @property
    def weights(self) -> Weights:
        """All weights by name, in order."""
        return {name: self.part_of(name).weights[name] for name in self.names}

    @property
    def on_device(self) -> Weights:
        """The weights on the device."""
        return self.resident.weights

    def part_of(self, name: str) -> HostLayer | ResidentLayer:
        """Return the part of the layer that has a weight."""
        return self.host if name in self.host.weights else self.resident

    @property
    def nbytes(self) -> int:
        """Bytes of `read`."""
        return sum(sizes[1] for sizes in self._sizes())

    def _sizes(self) -> Iterator[tuple[HostLayer | ResidentLayer, int]]:
        """Yield the part and the bytes of each weight, in order."""
        for name in self.names:
            part = self.part_of(name)
            shapes = part.weights if isinstance(part, HostLayer) else part.shapes
            yield part, sum(map(_padded, arrays_of({name: shapes[name]})))

    def write(self, data: np.ndarray, device: Device) -> None:
        """Take the bytes of a `HostLayer` with the same weights."""
        pieces: dict[int, list[np.ndarray]] = {id(self.host): [], id(self.resident): []}
        at = 0
        for part, size in self._sizes():
            pieces[id(part)].append(data[at : at + size])
            at += size
        for part in (self.host, self.resident):
            part.write(np.concatenate([*pieces[id(part)], np.zeros(0, np.uint8)]), device)

    def read(self, device: Device) -> np.ndarray:
        """Return the bytes that a `HostLayer` with the same weights would have."""
        rest = {id(part): part.read(device) for part in (self.host, self.resident)}
        found = []
        for part, size in self._sizes():
            found.append(rest[id(part)][:size])
            rest[id(part)] = rest[id(part)][size:]
        return np.concatenate(found)


Layer = HostLayer | ResidentLayer | SplitLayer
