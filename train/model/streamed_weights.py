"""Frozen weights that live in main memory and come to the device ahead of their use, a layer at a time.

Each layer's projections lie in one buffer of main memory. Two buffers of the device take turns: while one layer is
computed on, the next one (in the backward the one before) is copied into the other; nothing goes back. Some layers may
stay on the device: while one of them is computed on, both buffers are free for the streamed layers ahead. A head that
does not stay is copied when it is wanted and kept no longer than its product; of an embedding few rows are read, by the
shader, where it lies. Where few tokens are decoded, the weights of the experts that they choose are read so as well.
Copies are part of the device's work in its one order, so recordings have them.
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
from wgrad.train.model.stacks import stack_layer
from wgrad.train.model.weights import EMBEDDING, HEAD

Weights = dict[str, Any]  # name -> Array or FrozenWeight
# Experts are read in main memory by as many tokens as choose so large a part of them at most: each is read once then,
# or nearly so, and less than is copied of a whole layer.
_READ_THERE = 0.25
_COPIED_BELOW = 1 << 20  # bytes of an array of experts, such as a table that is read again and again


def mapped(weights: Mapping[str, Any], change: Callable[[Array], Array]) -> Weights:
    """The same weights with `change` applied to each of their arrays, in order."""
    return {n: w.map_arrays(change) if isinstance(w, FrozenWeight) else change(w) for n, w in weights.items()}


def arrays_of(weights: Mapping[str, Any]) -> list[Array]:
    """Their arrays, in order."""
    found: list[Array] = []
    mapped(weights, lambda array: found.append(array) or array)  # type: ignore[func-returns-value]
    return found


def _padded(array: Array) -> int:
    result: int = -(-array.nbytes // ALIGN) * ALIGN
    return result


def buffer_bytes(weights: Mapping[str, Any]) -> int:
    """Bytes of weights like these in one buffer, as `laid_out` has them."""
    return max(ALIGN, sum(map(_padded, arrays_of(weights))))


def stays(layer: int, layers: int, resident: int) -> bool:
    """Return whether a layer is one of the `resident` that stay on the device: those are spread evenly, so that each
    copy has as much work to run alongside, and the first layer is among them."""
    streamed = layers - resident
    return (layer + 1) * streamed // layers == layer * streamed // layers


def laid_out(weights: Mapping[str, Any], buffer: Array) -> Weights:
    """Weights like these in one buffer: an array after the other, each where a binding may start."""
    at = 0

    def view(array: Array) -> Array:
        nonlocal at
        start, at = at, at + _padded(array)
        return Array(buffer.lease, buffer.offset + start, array.shape, array.dtype)

    return mapped(weights, view)


def read_there(there: Weights, placed: Weights) -> Weights:
    """Weights of `there`, in main memory, of which small arrays are those of `placed`, copies on the device."""
    copies = iter(arrays_of(placed))
    return mapped(there, lambda array: _large(array, next(copies)))


def _large(array: Array, copy: Array) -> Array:
    return array if array.nbytes >= _COPIED_BELOW else copy


@dataclass(frozen=True)
class HostLayer:
    """A layer's weights in main memory: `weights` are views of `buffer` uint8 [n]."""

    buffer: Array
    weights: Weights

    @classmethod
    def like(cls, weights: Mapping[str, Any], device: Device) -> HostLayer:
        """With room for weights of these shapes, whose arrays may be of any device."""
        buffer = device.empty_host((buffer_bytes(weights),), np.uint8)
        return cls(buffer, laid_out(weights, buffer))

    @property
    def nbytes(self) -> int:
        """Bytes of `buffer`."""
        return int(self.buffer.nbytes)

    def spans(self, apart: Collection[str]) -> list[tuple[int, int]]:
        """Begins and ends of what is copied of `buffer` where large arrays of the weights with these names are not."""
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
    """A layer's weights that stay on the device, in arrays of their own: one buffer would be rounded up by more.
    shapes: weights like them, whose arrays may be of any device."""

    shapes: Weights
    weights: Weights = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of `read`."""
        return buffer_bytes(self.shapes)

    def write(self, data: np.ndarray, device: Device) -> None:
        """Take the bytes of a `HostLayer` with the same weights."""
        at = 0

        def placed(array: Array) -> Array:
            nonlocal at
            start, at = at, at + _padded(array)
            made: Array = device.empty(array.shape, array.dtype)
            device.write(made, data[start : start + array.nbytes].view(array.dtype).reshape(array.shape))
            return made

        self.weights.update(mapped(self.shapes, placed))

    def read(self, device: Device) -> np.ndarray:
        """Return the bytes that a `HostLayer` of the same weights has."""
        data, at = np.zeros(self.nbytes, np.uint8), 0
        for array in arrays_of(self.weights):
            data[at : at + array.nbytes] = device.download(array).reshape(-1).view(np.uint8)
            at += _padded(array)
        return data


class StreamedWeights(Mapping[str, Any]):
    """Name -> what a product takes: of the layer that was entered last, or of one that stays, on the device.

    resident: weights of no layer, norms, biases and perhaps the head, which stay on the device. tables: embedding and
    head, in main memory. experts: names of weights of which a token chooses this share: few tokens read them in main
    memory.
    """

    def __init__(
        self,
        device: Device,
        resident: Weights,
        tables: Weights,
        layers: Sequence[HostLayer | ResidentLayer],
        experts: Collection[str] = (),
        share: float = 0.0,
    ) -> None:
        self._device, self._resident, self._tables, self._layers = device, resident, tables, layers
        self._layer_of = {name: n for n, layer in enumerate(layers) for name in layer.weights}
        self._streamed = [n for n, layer in enumerate(layers) if isinstance(layer, HostLayer)]
        self._sources = [layer.buffer for layer in layers if isinstance(layer, HostLayer)]
        largest = max((source.size for source in self._sources), default=0)
        self._slots = [device.empty((largest,), np.uint8) for _ in self._sources[:2]]
        self._placed = {n: laid_out(layers[n].weights, self._slots[at % 2]) for at, n in enumerate(self._streamed)}
        self._share, self._few_tokens, self._experts = share, int(_READ_THERE / share) if share else 0, Weights()
        for n in self._streamed if self._few_tokens else ():
            names = [name for name in layers[n].weights if name in experts]
            there, placed = ({name: of[name] for name in names} for of in (layers[n].weights, self._placed[n]))
            self._experts |= read_there(there, placed)
        self._spans = [
            layer.spans(experts if self._few_tokens else ()) for layer in layers if isinstance(layer, HostLayer)
        ]
        self._placed |= {n: layer.weights for n, layer in enumerate(layers) if isinstance(layer, ResidentLayer)}
        self.begin()

    def begin(self, tokens: int | None = None) -> None:
        """A pass over the layers begins. What earlier ones left on the device is not known to a replay of this one.

        tokens: that are decoded; None: the pass is not one of decoding."""
        self._apart = tokens is not None and tokens <= self._few_tokens
        self._held: list[int | None] = [None, None]  # of each buffer, the streamed layer in it, by its place among them
        self._stacks: Weights = {}  # of the layer that was entered last
        self._last = -1

    def enter(self, layer: int) -> None:
        """This layer is computed next: it is on the device from here on, and its neighbours are on the way."""
        first, end = bisect_left(self._streamed, layer), bisect_right(self._streamed, layer)
        ahead = range(end, len(self._streamed)) if layer > self._last else range(first - 1, -1, -1)
        for place in (*range(first, end), *ahead)[: len(self._slots)]:
            self._fetch(place)
        self._last = layer
        if self._device.stacks_weights:
            self._stacks.clear()  # their memory is that of the next ones
            self._stacks |= stack_layer(self._placed[layer], self._device)

    def _fetch(self, place: int) -> None:
        slot = place % 2
        if self._held[slot] != place:
            source, view = self._sources[place], self._device.view
            for begin, end in self._spans[place] if self._apart else [(0, source.size)]:
                self._device.transfer(*(view(array, (end - begin,), begin) for array in (source, self._slots[slot])))
            self._held[slot] = place

    def table(self, name: str) -> Array:
        """The embedding or the head on the device, for as long as the caller keeps it."""
        if (source := self._tables.get(name)) is None:
            kept: Array = self._resident[name]
            return kept
        table: Array = self._device.empty(source.shape, source.dtype)
        self._device.transfer(source, table)
        return table

    def __getitem__(self, name: str) -> Any:
        if name in self._stacks:
            return self._stacks[name]
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
        return layer not in self._streamed[place : place + 1] or self._held[place % 2] == place

    def __iter__(self) -> Iterator[str]:
        return iter((*self._tables, *self._layer_of, *self._resident, *self._stacks))

    def __len__(self) -> int:
        return len(self._tables) + len(self._layer_of) + len(self._resident) + len(self._stacks)

    @property
    def token_bytes(self) -> int:
        """Bytes that come from main memory where one token is decoded."""
        whole = sum(int(source.nbytes) for source in self._sources)
        copied = sum(end - begin for spans in self._spans for begin, end in spans)
        head = self._tables.get(HEAD if HEAD in self._tables or HEAD in self._resident else EMBEDDING)
        return copied + round(self._share * (whole - copied)) + (0 if head is None else int(head.nbytes))

    @property
    def projections(self) -> Weights:
        """Those of all layers, where they lie."""
        return {name: w for layer in self._layers for name, w in layer.weights.items()}
