"""The recurrence of Mamba-2 in chunks. Kernels: ssd.hip.

Scratch memory is that of one segment: matrices and states of its chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

from wgrad.device.contract import DELTA_CHUNK
from wgrad.device.memory import Array
from wgrad.hip.delta_rule.chunks import STEPS, Call, from_element
from wgrad.hip.elements import GROUP, implements
from wgrad.hip.elementwise.elementwise import sum_rows
from wgrad.hip.runtime.runtime import Runtime


@dataclass
class _Scratch:
    """Arrays that the kernels of a segment pass on."""

    info: Array
    mats: Array
    states: Array


class _Call(Call):
    source = "ssd"

    def scratch(self) -> _Scratch:
        chunks, empty = self.segments[0][1], self.device.empty
        return _Scratch(
            empty((5, self.places)), empty((self.rows * chunks, DELTA_CHUNK**2)), empty((chunks, self.size))
        )

    def scan(
        self, x: _Scratch, states: Array, segment: tuple[int, int], before: Array | None, saved: Array | None,
        after: Array, backward: bool = False,
    ) -> None:  # fmt: skip
        """Turn each chunk's addition in `states` into the state before it (backward: the gradient after it)."""
        grid = (-(-self.keys * self.width // GROUP), self.rows, 1)
        flop = 2.0 * self.keys * self.width / DELTA_CHUNK
        self.launch("ssd_scan", [int(backward), x.info, states, before, saved, after], segment, grid, flop)

    def states(
        self, x: _Scratch, segment: tuple[int, int], before: Array | None, saved: Array | None, after: Array
    ) -> None:
        """Compute the states before each chunk. before, saved, after: as the arguments of ssd_scan."""
        arrays = [*self.gates, x.info, x.mats, x.states]
        flop = 2.0 * (DELTA_CHUNK * self.keys + self.keys * self.width)
        self.launch("ssd_system", arrays, segment, (segment[1], self.rows, 1), flop)
        self.scan(x, x.states, segment, before, saved, after)


@implements("ssd")
def ssd(
    device: Runtime,
    xbc: Array,
    g: Array,
    dt: Array,
    skip: Array,
    doc_start: Array,
    cache_len: Array,
    groups: int,
    state_dim: int,
    state: Array | None,
) -> tuple[Array, Array | None]:
    batch, tokens, heads = g.shape
    width = (xbc.shape[2] - 2 * groups * state_dim) // heads
    y = device.empty((batch, tokens, heads, width), xbc.dtype)
    call = _Call(device, xbc, (g, dt, doc_start, cache_len), y, groups, state_dim)
    if state is not None and tokens <= STEPS:
        flop = 5.0 * state_dim * width * tokens / DELTA_CHUNK
        call.launch("ssd_step", [*call.gates, skip, state, y], (0, 1), (call.tiles, call.rows, 1), flop)
        return y, None
    x, states = call.scratch(), call.states_before() if state is None else None
    before, after = state, device.empty((call.size,)) if state is None else state
    flop = 2.0 * (DELTA_CHUNK * width + state_dim * width)
    for number, segment in enumerate(call.segments):
        call.states(x, segment, before, None if states is None else from_element(states, number * call.size), after)
        grid = (segment[1], call.rows, call.tiles)
        call.launch("ssd_output", [x.info, x.mats, x.states, skip, y], segment, grid, flop)
        before = after
    return y, states


@implements("ssd_backward")
def ssd_backward(
    device: Runtime,
    dy: Array,
    xbc: Array,
    g: Array,
    dt: Array,
    skip: Array,
    doc_start: Array,
    cache_len: Array,
    states: Array,
    groups: int,
    state_dim: int,
    need_dskip: bool,
) -> tuple[Array, Array, Array, Array | None]:
    call = _Call(device, xbc, (g, dt, doc_start, cache_len), dy, groups, state_dim)
    dxbc, dg, ddt = device.empty(xbc.shape, xbc.dtype), device.empty(g.shape), device.empty(dt.shape)
    dskip = device.empty((call.batch * call.tokens, call.heads))  # of each token
    x, n, k, v = call.scratch(), DELTA_CHUNK, state_dim, call.width
    dstates, unused, carry = device.empty(x.states.shape), device.empty((call.size,)), device.empty((call.size,))
    dcb = device.empty((call.places, 2 * k))
    after: Array | None = None
    for number, segment in reversed(list(enumerate(call.segments))):
        call.states(x, segment, from_element(states, number * call.size), None, unused)
        grid = (segment[1], call.rows, call.tiles)
        call.launch("ssd_to_states", [x.info, dy, dstates], segment, grid, 2.0 * k * v)
        call.scan(x, dstates, segment, after, None, carry, backward=True)
        arrays = [x.info, x.mats, x.states, dstates, dy, skip, dcb, dxbc, dg, ddt, dskip]
        flop = 2.0 * (2 * n * v + 3 * k * v + 2 * n * k)
        call.launch("ssd_grads", arrays, segment, (segment[1], call.rows, 1), flop)
        call.launch_channels("ssd_channels", [dcb, dxbc], segment, 2.0 * k)
        after = carry
    return dxbc, dg, ddt, sum_rows(device, dskip, None, False) if need_dskip else None
