"""Mamba-1's recurrence in chunks of tokens, which run in parallel. Shaders: selective_scan_*.wgsl.

The backward works through segments of the sequence, whose scratch memory it uses again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wgrad.device.contract import SCAN_CHUNK
from wgrad.device.memory import Array
from wgrad.wgsl.elements import GROUP, next_power_of_two, wgsl_type
from wgrad.wgsl.elementwise.reduce import sum_rows
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.dispatch_parts import launch_range
from wgrad.wgsl.runtime.runtime import Runtime

_SPAN = 8  # tokens that a workgroup stages; selective_scan_grads.wgsl is written for so many
_SEGMENT = 32  # chunks of a segment of the backward, of all sequences
_WORKGROUPS = 1024  # that a backward should have; with more, each takes several blocks of channels
_MOST_ROUNDS = 8
_STEP = 128  # a view begins at a multiple of this many elements


def _padded(size: int) -> int:
    return _STEP * -(-size // _STEP)


@dataclass
class _Call:
    """The arguments of one call, and how its kernels are launched."""

    device: Runtime
    dt: Array
    bc: Array
    weight: Array

    def __post_init__(self) -> None:
        self.batch, self.tokens, self.channels = self.dt.shape
        self.numbers = self.weight.shape[1] - 2
        self.wide = max(8, next_power_of_two(self.numbers))
        self.blocks = -(-self.channels // (GROUP // self.wide))
        self.size = self.batch * self.channels * self.numbers  # of a state of all channels
        self.chunks = -(-self.tokens // SCAN_CHUNK)

    def launch(
        self, name: str, arrays: Sequence[Array | None], segment: tuple[int, int], types: dict[str, Array],
        flop: float, rounds: int = 1, places: Sequence[int] = (0, 0, 0, 0), **flags: bool,
    ) -> None:  # fmt: skip
        """Launch a kernel of chunks.

        types: arrays by the names that the shader gives their element types. flop: of a state of a token. places:
        sums_at, parts_at, flags_at and second of the parameters.
        """
        at, chunks = segment
        constants: dict[str, Constant] = {"WIDE": self.wide, "BLOCK": GROUP // self.wide, "SPAN": _SPAN, **flags}
        constants |= {kind: wgsl_type(array.dtype) for kind, array in {"T": self.dt, **types}.items()}
        params = [self.batch, self.tokens, self.channels, self.numbers, at, chunks, self.blocks, rounds, *places]
        count = self.batch * chunks * -(-self.blocks // rounds)
        work = flop * self.size * chunks * SCAN_CHUNK
        given = [arrays[0], self.dt, self.bc, self.weight, *arrays[1:]]
        launch_range(self.device, name, given, params, count, constants, work=work, heaviest=1.0)

    def carry(self, totals: Array, states: Array, carry: Array, chunks: int, backward: bool) -> None:
        params = [self.batch, self.channels, self.numbers, chunks]
        arrays, work = [self.weight, totals, states, carry], 4.0 * self.size * chunks
        count = -(-self.size // GROUP)
        constants: dict[str, Constant] = {"BACKWARD": backward}
        launch_range(self.device, "selective_scan_carry", arrays, params, count, constants, work=work, heaviest=1.0)


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
    call, y = _Call(device, dt, bc, weight), device.empty(x.shape, x.dtype)
    shape, whole = (call.chunks, call.batch, call.channels, call.numbers), (0, call.chunks)
    alone = call.chunks == 1  # then no other chunk waits for its state
    if alone:
        states = device.zeros(shape) if state is None else state
    else:
        states, carry = device.empty(shape), device.zeros((call.size,)) if state is None else state
        totals = device.empty((call.chunks, call.batch, call.channels))
        arrays = [x, doc_start, cache_len, totals, states]
        call.launch("selective_scan_ends", arrays, whole, {"X_T": x}, 6.0, BACKWARD=False)
        call.carry(totals, states, carry, call.chunks, False)
    arrays, stateful = [x, doc_start, cache_len, states, y], alone and state is not None
    call.launch("selective_scan_output", arrays, whole, {"X_T": x}, 8.0, STATEFUL=stateful)
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
    call = _Call(device, dt, bc, weight)
    most = min(call.chunks, max(1, _SEGMENT // call.batch))  # chunks of a segment
    rounds = max(1, min(_MOST_ROUNDS, call.batch * most * call.blocks // _WORKGROUPS))
    groups, rows, width = -(-call.blocks // rounds), call.batch * most, 2 * call.numbers
    sums_at = _padded(most * call.size)
    parts_at = sums_at + _padded(rows * weight.size * need_dweight)
    flags_at = parts_at + _padded(groups * rows * SCAN_CHUNK * width)
    scratch = device.empty((flags_at + rows * SCAN_CHUNK,))
    totals, carry = device.empty((most, call.batch, call.channels)), device.zeros((call.size,))
    second = _padded(x.size)
    dxdt, dbc = device.empty((2, second), x.dtype), device.empty(bc.shape, bc.dtype)
    if need_dweight:  # the last segment may have fewer chunks, whose sums others are added to
        sums = device.view(scratch, (rows, weight.size), sums_at)
        device.fill(sums, 0.0)
    for at in reversed(range(0, call.chunks, most)):
        here = min(most, call.chunks - at)
        segment, places = (at, here), (sums_at, parts_at, flags_at, second)
        arrays = [dy, doc_start, cache_len, totals, scratch]
        call.launch("selective_scan_ends", arrays, segment, {"X_T": dy}, 6.0, places=places, BACKWARD=True)
        call.carry(totals, scratch, carry, here, True)
        arrays, types = [x, states, dy, scratch, dxdt], {"X_T": x, "DY_T": dy}
        call.launch("selective_scan_grads", arrays, segment, types, 40.0, rounds, places, WEIGHT=need_dweight)
        parts = device.view(scratch, (groups, call.batch * here * SCAN_CHUNK * width), parts_at)
        params = [call.batch, call.tokens, width, at * SCAN_CHUNK, here * SCAN_CHUNK, groups]
        launched, constants = device.groups(parts.shape[1], GROUP), {"X_T": wgsl_type(bc.dtype)}
        device.launch("selective_scan_sum", [parts, dbc], params, launched, constants, work=float(parts.nbytes))
    dx, ddt = (device.view(dxdt, x.shape, number * second) for number in range(2))
    dweight = device.view(sum_rows(device, sums, None, False), weight.shape) if need_dweight else None
    return dx, ddt, dbc, dweight
