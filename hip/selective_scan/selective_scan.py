"""Mamba-1's recurrence in chunks of tokens, which run in parallel. Kernels: selective_scan.hip.

The backward works through segments of the sequence, whose scratch memory it uses again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wgrad.device.contract import SCAN_CHUNK
from wgrad.device.memory import Array
from wgrad.hip.elements import GROUP, implements, type_code, type_codes
from wgrad.hip.elementwise.elementwise import sum_rows
from wgrad.hip.runtime.runtime import Runtime

_SOURCE = "selective_scan"
_SEGMENT = 32  # chunks of a segment of the backward, of all sequences
_WORKGROUPS = 1024  # that a backward should have; with more, each takes several blocks of channels
_MOST_ROUNDS = 8


@dataclass
class _Call:
    """The arguments of one call, and how its kernels are launched."""

    device: Runtime
    given: tuple[Array, Array, Array, Array, Array]  # dt, bc, weight, doc_start, cache_len

    def __post_init__(self) -> None:
        dt, _, weight, *_ = self.given
        (self.batch, self.tokens, self.channels), self.numbers = dt.shape, weight.shape[1] - 2
        self.shift = max(3, (self.numbers - 1).bit_length())  # a channel has 1 << shift work-items
        self.blocks = -(-self.channels // (GROUP >> self.shift))
        self.size = self.batch * self.channels * self.numbers  # of a state of all channels
        self.chunks = -(-self.tokens // SCAN_CHUNK)

    def launch(
        self, kernel: str, x: Array, segment: tuple[int, int], more: Sequence[Any], flop: float,
        dy: Array | None = None, groups: int = 0,
    ) -> None:  # fmt: skip
        """flop: of a state of a token. more: the arguments after the sizes."""
        at, chunks = segment
        sizes = [self.batch, self.tokens, self.channels, self.numbers, self.shift, at, chunks]
        arguments = [x, *self.given, *sizes, type_codes(x, self.given[0], dy), *more]
        grid, work = (groups or self.blocks, chunks, self.batch), flop * self.size * chunks * SCAN_CHUNK
        self.device.launch(_SOURCE, f"selective_scan_{kernel}", arguments, grid, work=work)

    def carry(
        self, totals: Array, states: Array, before: Array | None, after: Array, chunks: int, backward: bool
    ) -> None:
        sizes = [self.batch, self.channels, self.numbers, chunks, int(backward)]
        arguments, grid = [self.given[2], totals, states, before, after, *sizes], (-(-self.size // GROUP), 1, 1)
        self.device.launch(_SOURCE, "selective_scan_carry", arguments, grid, work=4.0 * self.size * chunks)


@implements("selective_scan")
def selective_scan(
    device: Runtime,
    x: Array,
    dt: Array,
    bc: Array,
    weight: Array,
    doc_start: Array,
    cache_len: Array,
    state: Array | None,
) -> tuple[Array, Array | None]:
    call, y = _Call(device, (dt, bc, weight, doc_start, cache_len)), device.empty(x.shape, x.dtype)
    shape, whole = (call.chunks, call.batch, call.channels, call.numbers), (0, call.chunks)
    alone = call.chunks == 1  # then no other chunk waits for its state
    if alone:
        states = device.zeros(shape) if state is None else state
    else:
        states, totals = device.empty(shape), device.empty((call.chunks, call.batch, call.channels))
        call.launch("ends", x, whole, [0, totals, states], 6.0)
        call.carry(totals, states, state, device.empty((call.size,)) if state is None else state, call.chunks, False)
    call.launch("output", x, whole, [int(alone and state is not None), states, y], 8.0)
    return y, states if state is None else None


@implements("selective_scan_backward")
def selective_scan_backward(
    device: Runtime,
    dy: Array,
    x: Array,
    dt: Array,
    bc: Array,
    weight: Array,
    doc_start: Array,
    cache_len: Array,
    states: Array,
    need_dweight: bool,
) -> tuple[Array, Array, Array, Array | None]:
    call = _Call(device, (dt, bc, weight, doc_start, cache_len))
    most = min(call.chunks, max(1, _SEGMENT // call.batch))  # chunks of a segment
    rounds = max(1, min(_MOST_ROUNDS, call.batch * most * call.blocks // _WORKGROUPS))
    groups, width = -(-call.blocks // rounds), 2 * call.numbers
    dstates, totals = device.empty((most, call.size)), device.empty((most, call.batch, call.channels))
    parts, carry = device.empty((groups, call.batch * most * SCAN_CHUNK, width)), device.empty((call.size,))
    sums = device.zeros((call.batch * most, weight.size)) if need_dweight else None
    dx, ddt, dbc = (device.empty(array.shape, array.dtype) for array in (x, dt, bc))
    after: Array | None = None
    for at in reversed(range(0, call.chunks, most)):
        here = min(most, call.chunks - at)
        call.launch("ends", dy, (at, here), [1, totals, dstates], 6.0)
        call.carry(totals, dstates, after, carry, here, True)
        more = [rounds, states, dstates, dy, sums, parts, dx, ddt]
        call.launch("grads", x, (at, here), more, 40.0, dy, groups)
        numbers = call.batch * here * SCAN_CHUNK * width
        sizes = [call.batch, call.tokens, width, at * SCAN_CHUNK, here * SCAN_CHUNK, groups, type_code(bc.dtype)]
        grid = (-(-numbers // GROUP), 1, 1)
        device.launch(_SOURCE, "selective_scan_sum", [parts, dbc, *sizes], grid, work=4.0 * numbers * groups)
        after = carry
    dweight = None if sums is None else device.view(sum_rows(device, sums, None, False), weight.shape)
    return dx, ddt, dbc, dweight
