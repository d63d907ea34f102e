"""Frozen weights that stay in main memory and are copied to the device layer by layer, ahead of their use.

Each layer's projections are in one buffer of main memory. The device has two buffers that alternate: while one layer is
computed, the next one (in the backward the previous one) is copied to the other. Nothing is copied back. Some layers
may be resident on the device; while one of them is computed, both buffers are free for the streamed layers ahead.

A head that is not resident is copied for its GEMM and freed afterwards. Shaders read the few rows that they need of an
embedding directly in main memory. If few tokens are decoded, they read the chosen experts' weights there as well, or
from slots on the device that have the experts used last (expert_slots.py): then only the experts are in main memory.
Copies are queued in order with the device's other work, so recordings contain them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wgrad.device.contract import Device
from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.memory import ALIGN, Array
from wgrad.train.model.expert_slots import SPARE_SLOTS, ExpertSlots
from wgrad.train.model.stacks import stack_layer, stack_parts
from wgrad.train.model.weights import EMBEDDING, HEAD

Weights = dict[str, Any]  # Array or FrozenWeight by name
# Experts are read in main memory if the tokens together choose at most this part of them. Each is then read about once,
# which moves fewer bytes than copying the layer.
_READ_THERE = 0.25
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


class StreamedWeights(Mapping[str, Any]):
    """Weights by name for GEMMs. Those of a streamed layer can only be read after `enter`.

    Args:
        resident: Weights outside of layers, norms, biases and possibly the head, which stay on the device.
        tables: Embedding and head in main memory.
        layers: Projections of each layer.
        experts: Names of weights of experts, which few tokens read in main memory.
        share: Share of the experts that a token chooses.
        slots: Slots of each streamed layer for the most used experts.
        count: Number of experts in a layer.
    """

    def __init__(
        self,
        device: Device,
        resident: Weights,
        tables: Weights,
        layers: Sequence[Layer],
        experts: Collection[str] = (),
        share: float = 0.0,
        slots: int = 0,
        count: int = 0,
    ) -> None:
        self._device, self._resident, self._tables, self._layers = device, resident, tables, layers
        for layer in layers if device.stacks_weights else ():
            stack_parts(layer.on_device, device)
        self._layer_of = {name: n for n, layer in enumerate(layers) for name in layer.weights}
        hosts = {n: layer.host for n, layer in enumerate(layers) if layer.host is not None}
        self._streamed, self._sources = list(hosts), [host.buffer for host in hosts.values()]
        largest = max((source.size for source in self._sources), default=0)
        self._buffers = [device.empty((largest,), np.uint8) for _ in self._sources[:2]]
        placed = {n: laid_out(hosts[n].weights, self._buffers[at % 2]) for at, n in enumerate(hosts)}
        self._share, self._few_tokens, self._experts = share, int(_READ_THERE / share) if share else 0, Weights()
        for n in hosts if self._few_tokens else ():
            names = [name for name in hosts[n].weights if name in experts]
            self._experts |= read_there(*({name: of[name] for name in names} for of in (hosts[n].weights, placed[n])))
        self._spans = [host.spans(experts if self._few_tokens else ()) for host in hosts.values()]
        self._placed = {n: placed.get(n, {}) | layer.on_device for n, layer in enumerate(layers)}
        self._slots: dict[int, ExpertSlots] = {}
        if slots:
            biases = {f"{name}_bias" for name in experts} & resident.keys()
            for n, host in hosts.items():
                own = {name: resident[name] for name in biases if name.removesuffix("_bias") in host.weights}
                self._slots[n] = ExpertSlots(host.weights | own, count, slots, device)
        self._slot_tokens = int(slots / (SPARE_SLOTS * round(share * count))) if share else 0
        self._in_slots = {name: weight for of in self._slots.values() for name, weight in of.weights.items()}
        self.begin()

    def begin(self, tokens: int | None = None, adapted_experts: bool = False) -> None:
        """Begin a pass over the layers. It does not reuse layers left by earlier passes, which a replay may not find.

        tokens: number of tokens to decode, or None if the pass does not decode.
        adapted_experts: whether experts have adapters, whose rows are in the order of experts, not of slots.
        """
        few = tokens is not None and tokens <= self._slot_tokens and not adapted_experts
        self._cached: Weights = self._in_slots if few else {}
        self._apart = tokens is not None and tokens <= self._few_tokens
        self._held: list[int | None] = [None, None]  # index among the streamed layers of the one in each buffer
        self._stacks: Weights = {}  # stacks of the last entered layer
        self._last = -1

    def enter(self, layer: int) -> None:
        """Make a layer's weights available on the device, and start copying the streamed layers that follow."""
        first, end = bisect_left(self._streamed, layer), bisect_right(self._streamed, layer)
        ahead = range(end, len(self._streamed)) if layer > self._last else range(first - 1, -1, -1)
        for place in (*range(first, end), *ahead)[: 0 if self._cached else len(self._buffers)]:
            self._fetch(place)
        self._last = layer
        self._stacks.clear()  # so that the next ones reuse their memory
        if self._device.stacks_weights and isinstance(self._layers[layer], HostLayer):
            self._stacks |= stack_layer(self._placed[layer], self._device)

    def _fetch(self, place: int) -> None:
        """Copy a streamed layer to its buffer, unless it is there. place: its index among the streamed layers."""
        slot = place % 2
        if self._held[slot] != place:
            source, view = self._sources[place], self._device.view
            for begin, end in self._spans[place] if self._apart else [(0, source.size)]:
                self._device.transfer(*(view(array, (end - begin,), begin) for array in (source, self._buffers[slot])))
            self._held[slot] = place

    def slots_of(self, layer: int, ids: Array) -> tuple[Array, int] | None:
        """Return the slots from which `weights` gives a layer's experts, int32 [T, k], and their number in all. Missing
        experts are copied. None: the pass reads experts by their own number. ids: chosen experts, int32 [T, k]."""
        slots = self._slots.get(layer) if self._cached else None
        return None if slots is None else (slots.place(ids), slots.number)

    @property
    def use(self) -> tuple[int, int]:
        """Return how many experts decoding needed from slots so far, and how many of them were missing."""
        uses = [slots.use for slots in self._slots.values()]
        return sum(needed for needed, _ in uses), sum(missing for _, missing in uses)

    def table(self, name: str) -> Array:
        """Return the embedding or the head on the device. If it is a copy, the caller's reference keeps it."""
        if (source := self._tables.get(name)) is None:
            kept: Array = self._resident[name]
            return kept
        table: Array = self._device.empty(source.shape, source.dtype)
        self._device.transfer(source, table)
        return table

    def __getitem__(self, name: str) -> Any:
        if name in self._stacks:
            return self._stacks[name]
        if name in self._cached:
            return self._cached[name]
        layer = self._layer_of.get(name)
        if layer is None:
            return self._resident[name] if name in self._resident else self._tables[name]
        if not self._is_there(layer):
            raise LookupError(f"{name}: layer {layer} was not entered")
        if self._apart and name in self._experts:
            return self._experts[name]
        return self._placed[layer][name]

    def _is_there(self, layer: int) -> bool:
        place = bisect_left(self._streamed, layer)
        return bool(self._cached) or layer not in self._streamed[place : place + 1] or self._held[place % 2] == place

    def __iter__(self) -> Iterator[str]:
        return iter((*self._tables, *self._layer_of, *self._resident, *self._stacks))

    def __len__(self) -> int:
        return len(self._tables) + len(self._layer_of) + len(self._resident) + len(self._stacks)

    @property
    def token_bytes(self) -> int:
        """Bytes transferred from main memory to decode one token."""
        whole = sum(int(source.nbytes) for source in self._sources)
        copied = sum(end - begin for spans in self._spans for begin, end in spans)
        head = self._tables.get(HEAD if HEAD in self._tables or HEAD in self._resident else EMBEDDING)
        return copied + round(self._share * (whole - copied)) + (0 if head is None else int(head.nbytes))

    @property
    def projections(self) -> Weights:
        """Projections of all layers by name, in main memory or on the device."""
        return {name: w for layer in self._layers for name, w in layer.weights.items()}
