"""The recurrence of Mamba-2 in chunks: the kernels of the gated delta rule without its corrections, and ssd_*.wgsl."""

from __future__ import annotations

from wgrad.device.contract import DELTA_CHUNK
from wgrad.device.memory import Array
from wgrad.wgsl.delta_rule.delta_rule import STEPS, Call
from wgrad.wgsl.elementwise.reduce import sum_rows
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.runtime import Runtime


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
    call = Call(device, xbc, (g, dt, doc_start, cache_len), groups, state_dim, width, corrected=False)
    y = device.empty((batch, tokens, heads, width), xbc.dtype)
    if state is not None and tokens <= STEPS:
        parts = call.rows * -(-width // 64)
        arrays = [xbc, *call.gates, skip, state, y]
        call.launch("ssd_step", arrays, (0, 1), parts, 5.0 * state_dim * width * tokens / DELTA_CHUNK, Y_T=y)
        return y, None
    return y, call.forward(y, state, skip)


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
    width = dy.shape[3]
    gates = (g, dt, doc_start, cache_len)
    call = Call(device, xbc, gates, groups, state_dim, width, backward=True, corrected=False)
    stride = 64 * -(-g.size // 64)  # at which a view may begin
    dxbc, dgates, dbc = device.empty(xbc.shape, xbc.dtype), device.empty((3, stride)), None
    flop = 2.0 * (DELTA_CHUNK * width + 2 * state_dim * width + 2 * DELTA_CHUNK * state_dim)
    for segment, x, dstates in call.back(dy, states):
        dbc = device.empty((x.info.shape[1], 2 * state_dim)) if dbc is None else dbc
        arrays = [xbc, x.info, x.mats, x.values, x.states, dstates, dy, dbc]
        call.launch("ssd_grads", arrays, segment, call.rows * segment[1], flop, DY_T=dy)
        arrays = [x.info, x.values, dbc, dy, skip, dxbc, dgates]
        tokens = min(segment[1] * DELTA_CHUNK, call.tokens - segment[0])
        call.launch("ssd_channels", arrays, segment, call.batch * tokens, 2.0 * state_dim + 4 * width, DY_T=dy)
    dg, ddt = (device.view(dgates, g.shape, number * stride) for number in range(2))
    by_token = device.view(dgates, (call.batch * call.tokens, call.heads), 2 * stride)
    return dxbc, dg, ddt, sum_rows(device, by_token, None, False) if need_dskip else None
