"""Frozen weights that live in main memory and come to the device ahead of their use, a layer at a time.

Each layer's projections lie in one buffer of main memory. Two buffers of the device take turns: while one layer is
computed on, the next one (in the backward the one before) is copied into the other; nothing goes back. A head is
copied when it is wanted and kept no longer than its product; of an embedding few rows are read, by the shader, where it
lies. Copies are part of the device's work in its one order, so recordings have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wgrad.device.contract import Device
from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.memory import ALIGN, Array
from wgrad.train.model.stacks import stack_layer

Weights = dict[str, Any]  # name -> Array or FrozenWeight


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


def laid_out(weights: Mapping[str, Any], buffer: Array) -> Weights:
    """Weights like these in one buffer: an array after the other, each where a binding may start."""
    at = 0

    def view(array: Array) -> Array:
        nonlocal at
        start, at = at, at + _padded(array)
        return Array(buffer.lease, buffer.offset + start, array.shape, array.dtype)

    return mapped(weights, view)


@dataclass(frozen=True)
class HostLayer:
    """A layer's weights in main memory: `weights` are views of `buffer` uint8 [n]."""

    buffer: Array
    weights: Weights

    @classmethod
    def like(cls, weights: Mapping[str, Any], device: Device) -> HostLayer:
        """With room for weights of these shapes, whose arrays may be of any device."""
        buffer = device.empty_host((max(ALIGN, sum(map(_padded, arrays_of(weights)))),), np.uint8)
        return cls(buffer, laid_out(weights, buffer))


class StreamedWeights(Mapping[str, Any]):
    """Name -> what a product takes: of the layer that was entered last, on the device.

    resident: weights that stay on the device (norms, biases). tables: embedding and head, in main memory.
    """

    def __init__(self, device: Device, resident: Weights, tables: Weights, layers: Sequence[HostLayer]) -> None:
        self._device, self._resident, self._tables, self._layers = device, resident, tables, layers
        self._layer_of = {name: n for n, layer in enumerate(layers) for name in layer.weights}
        largest = max(layer.buffer.size for layer in layers)
        self._slots = [device.empty((largest,), np.uint8) for _ in range(min(2, len(layers)))]
        self._placed = [laid_out(layer.weights, self._slots[n % 2]) for n, layer in enumerate(layers)]
        self.begin()

    def begin(self) -> None:
        """A pass over the layers begins. What earlier ones left on the device is not known to a replay of this one."""
        self._held: list[int | None] = [None, None]
        self._stacks: Weights = {}  # of the layer that was entered last
        self._last = -1

    def enter(self, layer: int) -> None:
        """This layer is computed next: it is on the device from here on, and its neighbour is on the way."""
        self._fetch(layer)
        ahead = layer + 1 if layer > self._last else layer - 1
        if 0 <= ahead < len(self._layers):
            self._fetch(ahead)
        self._last = layer
        if self._device.stacks_weights:
            self._stacks.clear()  # their memory is that of the next ones
            self._stacks |= stack_layer(self._placed[layer], self._device)

    def _fetch(self, layer: int) -> None:
        slot = layer % 2
        if self._held[slot] != layer:
            source = self._layers[layer].buffer
            self._device.transfer(source, self._device.view(self._slots[slot], source.shape))
            self._held[slot] = layer

    def table(self, name: str) -> Array:
        """The embedding or the head on the device, for as long as the caller keeps it."""
        source = self._tables[name]
        table: Array = self._device.empty(source.shape, source.dtype)
        self._device.transfer(source, table)
        return table

    def __getitem__(self, name: str) -> Any:
        if name in self._stacks:
            return self._stacks[name]
        layer = self._layer_of.get(name)
        if layer is None:
            return self._resident[name] if name in self._resident else self._tables[name]
        if self._held[layer % 2] != layer:
            raise LookupError(f"{name}: layer {layer} was not entered")
        return self._placed[layer][name]

    def __iter__(self) -> Iterator[str]:
        return iter((*self._tables, *self._layer_of, *self._resident, *self._stacks))

    def __len__(self) -> int:
        return len(self._tables) + len(self._layer_of) + len(self._resident) + len(self._stacks)

    @property
    def projections(self) -> Weights:
        """Those of all layers, in main memory."""
        return {name: w for layer in self._layers for name, w in layer.weights.items()}
