"""Frozen weights that stay in main memory and are copied to the device layer by layer, ahead of their use.

Each layer's projections are in one buffer of main memory. The device has two buffers that alternate: while one layer is
computed, the next one (in the backward the previous one) is copied to the other. Nothing is copied back. Some layers
may be resident on the device; while one of them is computed, both buffers are free for the streamed layers ahead.

A head that is not resident is copied for its GEMM and freed afterwards. Shaders read the few rows that they need of an
embedding directly in main memory. If few tokens are decoded, they read the chosen experts' weights there as well, or
from slots on the device that have the experts used last (expert_slots.py). Then only the experts are in main memory,
and for more tokens those that they chose are gathered.

Copies are queued in order with the device's other work, so recordings contain them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from wgrad.autograd.ops.routing import Groups, group
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Device
from wgrad.device.memory import Array
from wgrad.train.model.expert_slots import SPARE_SLOTS, ExpertSlots
from wgrad.train.model.host_layers import HostLayer, Layer, Weights, laid_out, read_there
from wgrad.train.model.stacks import stack_layer, stack_parts
from wgrad.train.model.weights import EMBEDDING, HEAD

# Experts are read in main memory if the tokens together choose at most this part of them. Each is then read about once,
# which moves fewer bytes than copying the layer.
_READ_THERE = 0.25
# With slots, the chosen experts are gathered if all have at most so many rows on average. With more rows nearly all are
# chosen, and copies of whole layers overlap with the GEMMs of the layer before.
_GATHERED_ROWS = 64


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
                self._slots[n] = ExpertSlots(host.weights | own, count, slots, device, placed[n])
        self._slot_tokens = int(slots / (SPARE_SLOTS * round(share * count))) if share else 0
        self._in_slots = {name: weight for of in self._slots.values() for name, weight in of.weights.items()}
        self._gathered = {name: weight for of in self._slots.values() for name, weight in of.gathered.items()}
        self.begin()

    def begin(self, tokens: int | None = None, adapted_experts: bool = False, is_step: bool = True) -> None:
        """Begin a pass over the layers. It does not reuse layers left by earlier passes, which a replay may not find.

        tokens: number of tokens to decode, or None if the pass does not decode.
        adapted_experts: whether experts have adapters, whose rows are in the order of experts, not of slots.
        is_step: whether it is a step of decoding, whose experts `use` counts, and no prompt.
        """
        decodes, self._is_step = tokens is not None, is_step
        count = tokens or 0
        self._by_slot = decodes and count <= self._slot_tokens and not adapted_experts
        gathers = decodes and count * self._share <= _GATHERED_ROWS
        self._cached: Weights = self._in_slots if self._by_slot else self._gathered if gathers else {}
        self._apart = decodes and count <= self._few_tokens
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

    def group(self, layer: int, ids: Tensor, experts: int) -> Groups:
        """Group the slots of ids, int32 [T, k], by expert, or by the slot from which a layer's weights are then given,
        after copying those that are missing. experts: their number."""
        slots = self._slots.get(layer) if self._cached else None
        if slots is not None and self._by_slot:
            return group(slots.place(ids.data), slots.number, self._device)
        groups = group(ids, experts, self._device)
        if slots is not None:
            slots.gather(groups.start, self._is_step)
        return groups

    @property
    def use(self) -> tuple[int, int]:
        """Return how many experts steps of decoding needed so far, and how many of them were in no slot."""
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
    def by_name(self) -> Weights:
        """Weights of all layers, and what stays on the device, as of the projections."""
        return {**self._resident, **self.projections}

    @property
    def projections(self) -> Weights:
        """Projections of all layers by name, in main memory or on the device."""
        return {name: w for layer in self._layers for name, w in layer.weights.items()}
