"""The gated delta rule in chunks, one segment of the sequence at a time. Shaders: delta_rule_*.wgsl.

Scratch memory is that of one segment: matrices, states and values of its chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from wgrad.device.contract import DELTA_CHUNK, delta_segments
from wgrad.device.memory import Array
from wgrad.wgsl.elements import GROUP, wgsl_type
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.cooperative_shapes import BLOCK
from wgrad.wgsl.runtime.dispatch_parts import launch_range
from wgrad.wgsl.runtime.runtime import Runtime

STEPS = 8  # up to so many tokens, a state is advanced token by token
_ROOMY = 24 << 10  # bytes of workgroup memory for a scan with the inner dimension in four shares
# Key widths that tensor cores serve, and the bytes of workgroup memory that they take.
_ON_UNITS = {64: 32 << 10, 128: 45 << 10}
_MATRIX_KERNELS = {
    "delta_rule_system": "delta_rule_system_matrix",
    "delta_rule_scan": "delta_rule_scan_matrix",
    "delta_rule_output": "delta_rule_output_matrix",
    "delta_rule_scan_backward": "delta_rule_scan_backward_matrix",
    "delta_rule_grads": "delta_rule_grads_matrix",
}
_DEEP = 48 << 10  # bytes of workgroup memory to stage 64 of the inner dimension at a time


@dataclass
class Scratch:
    """Arrays that the kernels of a segment pass to each other (delta_rule.inc.wgsl)."""

    info: Array
    mats: Array
    values: Array
    states: Array
    operands: Array | None


@dataclass
class Call:
    """The arguments of one call, and how its kernels are launched. corrected: as of delta_rule.inc.wgsl."""

    device: Runtime
    qkv: Array
    gates: tuple[Array, Array, Array, Array]  # g, beta, doc_start, cache_len
    key_heads: int
    keys: int
    values: int
    backward: bool = False
    corrected: bool = True

    def __post_init__(self) -> None:
        (self.batch, self.tokens, self.heads), self.channels = self.gates[0].shape, self.qkv.shape[2]
        self.rows = self.batch * self.heads
        self.wide = 4 * -(-self.values // 4)  # rows of scratch arrays have a multiple of four numbers
        self.size = self.rows * self.keys * self.wide  # of a state of all heads
        # Of a scan: columns, and shares of the inner dimension.
        self.scan = (16, 4) if self.device.workgroup_bytes >= _ROOMY else (16, 2)
        # The kernels on tensor cores are for float16, subgroups of 32 and matrices of 16 x 16 x 16.
        device, served = self.device, self.corrected and self.qkv.dtype == np.float16
        served = served and self.keys in _ON_UNITS and self.values % 64 == 0
        usual = device.matrix_units and device.lanes == 32 and device.matrix_shape == BLOCK
        self.units = served and usual and device.workgroup_bytes >= _ON_UNITS[self.keys]
        if self.units:
            self.scan = (32, 2)

    @property
    def segments(self) -> list[tuple[int, int]]:
        return delta_segments(self.rows, self.tokens)

    @property
    def _planes(self) -> int:
        """Matrices of keys or queries that each chunk has in scratch memory."""
        return 5 if self.backward else 2

    def scratch(self) -> Scratch:
        chunks, empty = self.segments[0][1], self.device.empty
        tokens = self.rows * chunks * DELTA_CHUNK
        matrices = self._planes * 4 * DELTA_CHUNK * -(-self.keys // 4)
        return Scratch(
            empty((6 + self.backward * (2 - self.corrected), tokens)),
            empty((self.rows * chunks, 3 * DELTA_CHUNK**2 + (0 if self.units else matrices))),
            empty((2 if self.backward else 1, tokens, self.wide)),
            empty((chunks + 1, self.size)),
            empty((self.rows * chunks, matrices), np.float16) if self.units else None,
        )

    def launch(self, name: str, arrays: Sequence[Array | None], segment: tuple[int, int], groups: int, flop: float,
               tile: tuple[int, int] = (64, 1), **types: Array) -> None:  # fmt: skip
        """flop: of a token of a head. tile: columns, and shares of the inner dimension."""
        columns, split = tile
        at, chunks = segment
        if self.units:
            name = _MATRIX_KERNELS.get(name, name)
        left = 272 * split if split == 1 else split * max(272, 16 * columns)
        constants: dict[str, Constant] = {"COLUMNS": columns, "SPLIT": split, "LEFT": left, "PLANES": self._planes}
        constants |= {"INVOCATIONS": 4 * columns * split, "BACKWARD": "DY_T" in types, "CORRECTED": self.corrected}
        constants["UNITS"] = self.units
        constants |= {kind: wgsl_type(array.dtype) for kind, array in (("QKV_T", self.qkv), *types.items())}
        if name in _MATRIX_KERNELS.values():
            constants |= {"KEYS": self.keys, "KEY_STEPS": self.keys // 16, "HALVES": self.keys // 64}
            deep = 64 if self.device.workgroup_bytes >= _DEEP else 32
            constants |= {"LOADS": self.keys // 16, "DEEP": deep, "RUNS": deep // 16}
        if name in ("delta_rule_grads", "ssd_grads"):
            constants["FEW_REGISTERS"] = self.device.few_registers
        tiles = -(-self.values // columns)
        params: list[int | float] = [self.batch, self.tokens, self.heads, self.key_heads, self.keys, self.values]
        params += [self.keys**-0.5, at, chunks, tiles]
        work = flop * self.rows * chunks * DELTA_CHUNK
        launch_range(self.device, name, arrays, params, groups, constants, work=work, heaviest=1.0)

    def move(self, source: Array, at: int, target: Array, into: int) -> None:
        """Copy state number `at` of source, of all heads, to `into` of target. Scratch arrays have rows of its size."""
        rows, params = self.rows * self.keys, [self.rows * self.keys, self.values]
        for array, number in ((source, at), (target, into)):
            width = self.wide if array.shape[-1] == self.size else self.values
            params += [width, number * rows * width]
        groups = self.device.groups(rows * self.values, GROUP)
        self.device.launch("delta_rule_move", [source, target], params, groups, {}, work=8.0 * self.size)

    def states(self, x: Scratch, segment: tuple[int, int]) -> None:
        """Compute the states before and after each chunk from the one in slot 0."""
        n, k, v = DELTA_CHUNK, self.keys, self.values
        chunks = self.rows * segment[1]
        arrays = [self.qkv, *self.gates, x.info, x.mats, x.values, x.operands]
        self.launch("delta_rule_system", arrays, segment, chunks, 2.0 * n * (2 * k + v) + n * n)
        groups = self.rows * -(-v // self.scan[0])
        arrays = [x.info, x.operands or x.mats, x.values, x.states]
        self.launch("delta_rule_scan", arrays, segment, groups, 4.0 * v * k, self.scan)

    def forward(self, y: Array, state: Array | None, *more: Array) -> Array | None:
        """Fill y; without `state`, return the states before every segment. more: inputs of the output kernel."""
        x, first = self.scratch(), self.device.zeros((self.size,)) if state is None else state
        saved = None
        if state is None:
            saved = self.device.empty((len(self.segments), self.batch, self.heads, self.keys, self.values))
            self.move(first, 0, saved, 0)
        self.move(first, 0, x.states, 0)
        carry = self.device.empty((self.size,)) if len(self.segments) > 1 else None
        flop = 2.0 * (DELTA_CHUNK * (self.keys + self.values) + self.keys * self.values)
        for number, segment in enumerate(self.segments):
            if number and carry is not None:
                self.move(carry, 0, x.states, 0)
                if saved is not None:
                    self.move(carry, 0, saved, number)
            self.states(x, segment)
            arrays = [self.qkv, x.info, x.mats, x.values, x.states, y, *more]
            self.launch("delta_rule_output", arrays, segment, self.rows * segment[1], flop, Y_T=y)
            if carry is not None:
                self.move(x.states, segment[1], carry, 0)
        if state is not None:
            self.move(x.states, self.segments[-1][1], state, 0)
        return saved

    def back(self, dy: Array, states: Array) -> Iterator[tuple[tuple[int, int], Scratch, Array]]:
        """Yield the segments, last first, with the inputs of their gradients.

        These are scratch, whose `values` then hold the gradient of what each token adds to the state, and the gradients
        of the states.
        """
        x, carry = self.scratch(), self.device.zeros((self.size,))
        dstates, n, k, v = self.device.empty(x.states.shape), DELTA_CHUNK, self.keys, self.values
        for number, segment in reversed(list(enumerate(self.segments))):
            self.move(states, number, x.states, 0)
            self.states(x, segment)
            arrays: list[Array | None] = [self.qkv, x.info, x.mats, x.values, None, dy]
            chunks = self.rows * segment[1]
            self.launch("delta_rule_output", arrays, segment, chunks, 2.0 * n * (k + v), Y_T=dy, DY_T=dy)
            self.move(carry, 0, dstates, segment[1])
            arrays = [x.info, x.operands or x.mats, dy, x.values, dstates]
            groups = self.rows * -(-v // self.scan[0])
            self.launch("delta_rule_scan_backward", arrays, segment, groups, 6.0 * v * k, self.scan, DY_T=dy)
            self.move(dstates, 0, carry, 0)
            yield segment, x, dstates


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
    values = (qkv.shape[2] - 2 * key_heads * key_dim) // heads
    call = Call(device, qkv, (g, beta, doc_start, cache_len), key_heads, key_dim, values)
    y = device.empty((batch, tokens, heads, values), qkv.dtype)
    if state is not None and tokens <= STEPS:
        arrays = [qkv, *call.gates, state, y]
        groups = call.rows * -(-values // 64)
        call.launch("delta_rule_step", arrays, (0, 1), groups, 8.0 * key_dim * values * tokens / DELTA_CHUNK, Y_T=y)
        return y, None
    return y, call.forward(y, state)


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
    values = dy.shape[3]
    call = Call(device, qkv, (g, beta, doc_start, cache_len), key_heads, key_dim, values, True)
    dqkv, dg, dbeta = device.empty(qkv.shape, qkv.dtype), device.empty(g.shape), device.empty(beta.shape)
    dqk = None
    n, k, v = DELTA_CHUNK, key_dim, values
    for segment, x, dstates in call.back(dy, states):
        dqk = device.empty((x.info.shape[1], 2 * key_dim)) if dqk is None else dqk
        arrays = [qkv, x.info, x.mats, x.values, x.states, dstates, dy, dqk]
        flop = 2.0 * (3 * n * v + 3 * k * v + 4 * n * k)
        call.launch("delta_rule_grads", arrays, segment, call.rows * segment[1], flop, DY_T=dy)
        arrays = [qkv, x.info, x.values, dqk, dqkv, dg, dbeta]
        tokens = min(segment[1] * DELTA_CHUNK, call.tokens - segment[0])
        call.launch("delta_rule_channels", arrays, segment, call.batch * tokens, 16.0 * k + 4 * v)
    return dqkv, dg, dbeta
