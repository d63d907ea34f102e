"""The cache of a decoder: keys and values of attention, and states of linear attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from wgrad.autograd import functional as F
from wgrad.autograd.ops.decoding import check_room
from wgrad.autograd.ops.sinks import attend
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array, Device
from wgrad.train.model.chunks import in_chunks
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.model_inputs import Inputs

_SHARED_ELEMENTS = 16 << 20  # most elements of all layers' keys that share one buffer
_STEP = 128  # views begin at multiples of this many elements


class Rows(NamedTuple):
    """Consecutive rows of a cache: their indices, int32 [B], and the first index, int32 [1]."""

    numbers: Array
    first: Array


class Rope(NamedTuple):
    """Rotation of new keys: cos and sin float32 [P, J], and each token's row in them, int32 [N]."""

    cos: Array
    sin: Array
    positions: Array
    interleaved: bool


@dataclass
class KVCache:
    """Arrays of each layer, by its index.

    Attributes:
        keys, values: Of attention, [B, S, G, D], for layers that do not use another layer's. `Inputs.cache_len` is the
            number of filled places.
        states: Of linear attention after the tokens so far, float32 [B, H, K, V].
        histories: Last inputs of linear attention's convolution, [B, W - 1, C].
        rows: Rows of the batch in states and histories, if these have more rows than a batch.
    """

    keys: dict[int, Array]
    values: dict[int, Array]
    states: dict[int, Array] = field(default_factory=dict)
    histories: dict[int, Array] = field(default_factory=dict)
    rows: Rows | None = None

    @classmethod
    def empty(
        cls, config: ModelConfig, batch: int, length: int, dtype: Any, device: Device, rows: int | None = None
    ) -> KVCache:
        """Return an empty cache. rows: number of rows of states and histories, if it is not `batch`."""
        # Zeros, because masked values are multiplied by 0, and 0 times an old NaN would be NaN.
        c = config.linear
        linear = [i for i in range(config.num_hidden_layers) if config.linear_of(i)]
        layers = [i for i in range(config.num_hidden_layers) if config.attends(i) and config.kv_source(i) == i]
        shapes = {i: (batch, length, config.kv_heads_of(i), config.key_width_of(i)) for i in layers}
        keys, values = (_zeros(shapes, dtype, device, rows is None) for _ in range(2))
        if c is None:
            return cls(keys, values)
        rows = batch if rows is None else rows
        history = (rows, c.width - 1, c.channels)
        histories = {i: device.zeros(history, dtype) for i in linear if c.width > 1}
        return cls(keys, values, {i: device.zeros((rows, *c.state)) for i in linear if c.state}, histories)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        sinks: Any,
        inputs: Inputs,
        rope: Rope | None,
        chunk: int = 0,
        **options: Any,
    ) -> Tensor:
        """Append k, rotated by `rope` if given, and v [N, G, D], and return attention of q [B, T, H, D] on all keys, or
        on those of each token's chunk.

        k and v are None if another layer has appended its own, which this one uses.
        """
        device = q.device
        if k is not None and v is not None:
            self._append(layer, k, v, inputs, rope)
        every = Tensor(self.keys[layer], device), Tensor(self.values[layer], device)
        seen = in_chunks(inputs, chunk, device) if chunk else inputs
        return attend(q, *every, sinks, seen.doc_start, inputs.cache_len, **options)

    def _append(self, layer: int, k: Tensor, v: Tensor, inputs: Inputs, rope: Rope | None) -> None:
        device, keys, values = k.device, self.keys[layer], self.values[layer]
        check_room("kv_append" if rope is None else "rope_append", keys, inputs.tokens, inputs.cache_len)
        if rope is not None:
            tables, turned = rope[:3], {"interleaved": rope.interleaved}
            device.rope_append(k.data, v.data, *tables, keys, values, inputs.cache_len, **turned)
        else:
            for part, new in ((keys, k), (values, v)):
                rows = new.reshape(inputs.batch, inputs.tokens, *new.shape[1:])
                device.kv_append(part, rows.data, inputs.cache_len)

    def with_history(self, layer: int, x: Tensor) -> Tensor:
        """Return x [B, T, C] after the history, and make its last tokens the next history."""
        if layer not in self.histories:
            return x
        history = self._taken(self.histories[layer], x.device)
        whole = F.cat([Tensor(history, x.device), x], dim=1)
        self._put(self.histories[layer], whole[:, x.shape[1] :].data, x.device)
        return whole

    def state(self, layer: int, device: Device) -> Array:
        """Return the state of the batch in a layer, which the caller overwrites."""
        return self._taken(self.states[layer], device)

    def keep_state(self, layer: int, state: Array, device: Device) -> None:
        """Store the state that `state` returned and the caller has changed."""
        if self.rows is not None:
            self._put(self.states[layer], state, device)

    def _taken(self, array: Array, device: Device) -> Array:
        if self.rows is None:
            return array
        found = device.embedding(as_table(array, device), self.rows.numbers, dtype=array.dtype)
        return device.view(found, (found.shape[0], *array.shape[1:]))

    def _put(self, array: Array, value: Array, device: Device) -> None:
        if self.rows is None:
            device.copy(value, array)
        else:
            put_rows(device, array, value, self.rows.first)


def _zeros(shapes: Mapping[int, tuple[int, ...]], dtype: Any, device: Device, fixed: bool) -> dict[int, Array]:
    """Return zeros of these shapes. fixed: no array will be replaced by a larger one, so small ones share a buffer.

    Sharing saves memory: below a memory limit an array may get a block of many times its size, and these are two for
    each layer.
    """
    sizes = [-(-math.prod(shape) // _STEP) * _STEP for shape in shapes.values()]
    if not fixed or sum(sizes) > _SHARED_ELEMENTS:
        return {layer: device.zeros(shape, dtype) for layer, shape in shapes.items()}
    buffer = device.zeros((sum(sizes),), dtype)
    begins = accumulate(sizes, initial=0)
    return {layer: device.view(buffer, shape, begin) for (layer, shape), begin in zip(shapes.items(), begins)}


def as_table(array: Array, device: Device) -> Array:
    """Return a view [R, N] of [R, ...]."""
    return device.view(array, (array.shape[0], math.prod(array.shape[1:])))


def put_rows(device: Device, array: Array, rows: Array, first: Array) -> None:
    """Write rows [N, ...] to array [R, ...] from row first[0] on, up to its end.

    This uses the operator that appends to a cache, since a view cannot begin at every row.
    """
    width = math.prod(array.shape[1:])
    table, new = (device.view(x, (1, x.shape[0], 1, width)) for x in (array, rows))
    device.kv_append(table, new, first)
