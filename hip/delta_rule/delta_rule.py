"""The gated delta rule in chunks, one segment of the sequence at a time. Kernels: delta_rule.hip.

Scratch memory is that of one segment: matrices, states and values of its chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wgrad.device.contract import DELTA_CHUNK
from wgrad.device.memory import Array
from wgrad.hip.delta_rule.chunks import STEPS, Call, from_element
from wgrad.hip.elements import implements
from wgrad.hip.runtime.runtime import Runtime


@dataclass
class _Scratch:
    """Arrays that the kernels of a segment pass on."""

    info: Array
    mats: Array
    decayed: Array
    values: Array
    states: Array


class _Call(Call):
    source = "delta_rule"

    def scratch(self, planes: int) -> _Scratch:
        chunks, empty = self.segments[0][1], self.device.empty
        tokens = self.places
        return _Scratch(
            empty((6, tokens)),
            empty((self.rows * chunks, 3 * DELTA_CHUNK**2)),
            empty((tokens, self.keys)),
            empty((planes, tokens, self.width)),
            empty((chunks, self.size)),
        )

    def launch(
        self,
        kernel: str,
        arrays: Sequence[Any],
        segment: tuple[int, int],
        grid: tuple[int, int, int],
        flop: float,
    ) -> None:
        super().launch(kernel, [float(self.keys**-0.5), *arrays], segment, grid, flop)

    def states(
        self, x: _Scratch, segment: tuple[int, int], before: Array | None, saved: Array | None, after: Array
    ) -> None:
        """Compute the states before each chunk. before, saved, after: as the arguments of delta_scan."""
        n, k, v = DELTA_CHUNK, self.keys, self.width
        arrays = [*self.gates, x.info, x.mats, x.decayed, x.values]
        self.launch("delta_system", arrays, segment, (segment[1], self.rows, 1), 2.0 * n * (3 * k + v) + n * n)
        through = [x.info, x.decayed, x.values, x.states, before, saved, after]
        self.launch("delta_scan", through, segment, (self.tiles, self.rows, 1), 4.0 * v * k)


@implements("delta_rule")
def delta_rule(
    device: Runtime,
    qkv: Array,
    g: Array,
    beta: Array,
    doc_start: Array,
    cache_len: Array,
    key_heads: int,
    key_dim: int,
    state: Array | None,
) -> tuple[Array, Array | None]:
    batch, tokens, heads = g.shape
    width = (qkv.shape[2] - 2 * key_heads * key_dim) // heads
    y = device.empty((batch, tokens, heads, width), qkv.dtype)
    call = _Call(device, qkv, (g, beta, doc_start, cache_len), y, key_heads, key_dim)
    if state is not None and tokens <= STEPS:
        flop = 8.0 * key_dim * width * tokens / DELTA_CHUNK
        call.launch("delta_step", [*call.gates, state, y], (0, 1), (call.tiles, call.rows, 1), flop)
        return y, None
    x, segments = call.scratch(1), call.segments
    states = call.states_before() if state is None else None
    before, after = state, device.empty((call.size,)) if state is None else state
    flop = 2.0 * (DELTA_CHUNK * width + key_dim * width)
    for number, segment in enumerate(segments):
        call.states(x, segment, before, None if states is None else from_element(states, number * call.size), after)
        grid = (segment[1], call.rows, call.tiles)
        call.launch("delta_output", [x.info, x.mats, x.values, x.states, y], segment, grid, flop)
        before = after
    return y, states


@implements("delta_rule_backward")
def delta_rule_backward(
    device: Runtime,
    dy: Array,
    qkv: Array,
    g: Array,
    beta: Array,
    doc_start: Array,
    cache_len: Array,
    states: Array,
    key_heads: int,
    key_dim: int,
) -> tuple[Array, Array, Array]:
    call = _Call(device, qkv, (g, beta, doc_start, cache_len), dy, key_heads, key_dim)
    dqkv, dg, dbeta = device.empty(qkv.shape, qkv.dtype), device.empty(g.shape), device.empty(beta.shape)
    x, n, k, v = call.scratch(2), DELTA_CHUNK, key_dim, call.width
    dstates, unused, carry = device.empty(x.states.shape), device.empty((call.size,)), device.empty((call.size,))
    dqk = device.empty((x.info.shape[1], 2 * key_dim))
    after: Array | None = None
    for number, segment in reversed(list(enumerate(call.segments))):
        call.states(x, segment, from_element(states, number * call.size), None, unused)
        through = [x.info, x.mats, x.decayed, dy, x.values, dstates, after, carry]
        flop = 2.0 * (n * v + 2 * k * v + n * k)
        call.launch("delta_scan_backward", through, segment, (call.tiles, call.rows, 1), flop)
        arrays = [x.info, x.mats, x.values, x.states, dstates, dy, dqk, dqkv, dg, dbeta]
        flop = 2.0 * (3 * n * v + 3 * k * v + 4 * n * k)
        call.launch("delta_grads", arrays, segment, (segment[1], call.rows, 1), flop)
        call.launch_channels("delta_channels", [x.info, dqk, dqkv], segment, 8.0 * k)
        after = carry
    return dqkv, dg, dbeta
