"""linear_cross_entropy: matmul with the output layer, loss and all gradients, one chunk of tokens at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from wgrad.device.dry_run import chunk_starts
from wgrad.device.memory import Array
from wgrad.wgsl.elementwise.reduce import sum_rows
from wgrad.wgsl.gemm.dequantized import LEAST_ROWS
from wgrad.wgsl.gemm.gemm import matmul, multiply
from wgrad.wgsl.gemm.gemm_epilogue import Epilogue
from wgrad.wgsl.gemm.plan import Gemm, plan_on
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.runtime import Runtime

# Logits of one chunk. Larger chunks make faster matmuls; this is small next to a model and its activations.
CHUNK_BYTES = 128 << 20
# Chunks that are computed at once with a weight that is kept in blocks: then there is memory left.
CHUNKS_AT_ONCE = 4
_HALVES = "float16", "float16", "float32"  # dtypes of the gradient's matmul on tensor cores
# Gradients of logits lie in -1 to 1. In float16 they are multiplied by this, so that small ones are not flushed.
_HALF_SCALE = 2.0**15


@implements("linear_cross_entropy")
def linear_cross_entropy(
    device: Runtime,
    x: Array,
    weight: Array,
    targets: Array,
    bias: Array | None,
    need_dx: bool,
    need_dweight: bool,
    need_dbias: bool,
    softcap: float,
    per_target: bool,
) -> tuple[Array, Array | None, Array | None, Array | None]:
    (n, c), v = x.shape, weight.shape[0]
    losses = device.empty((n,))
    dx = device.empty((n, c)) if need_dx else None
    dweight = device.empty((v, c)) if need_dweight else None
    dbias = device.empty((v,)) if need_dbias else None
    rows = _chunk_rows(n, min(CHUNK_BYTES, device.max_binding_bytes) // (4 * v))
    blocks = device.dequantized.dense(weight) if device.matrix_units and x.dtype == np.float16 else None
    at_once = _chunks_at_once(device, n, rows, v) if blocks is not None else 1
    # Sums are added up as those of single chunks, to the same bits.
    splits = plan_on(device, Gemm((rows, c, v), *_HALVES, in_blocks=True)).splits if at_once > 1 else None
    rows *= at_once
    # The last chunk may be shorter: its logits are a view of the same memory.
    memory = device.empty((rows, v))
    grad = need_dx or need_dweight or need_dbias
    # Float16 gradients are for tensor cores; a bias's gradient is summed in float32.
    half = grad and not need_dbias and device.matrix_units and x.dtype == np.float16 and v % 8 == 0 and c % 8 == 0
    grads = device.empty((rows, v), np.float16) if half else memory
    alpha = 1 / _HALF_SCALE if half else 1.0
    for first in chunk_starts(device, n, rows):
        count = min(rows, n - first)
        part = device.view(x, (count, c), first * c)
        logits = device.view(memory, (count, v))
        in_blocks = blocks is not None and count > LEAST_ROWS
        matrix = blocks if blocks is not None and in_blocks else weight
        matmul(device, part, matrix, Epilogue(logits, bias=bias), trans_b=True, in_blocks=in_blocks)
        dlogits = device.view(grads, (count, v))
        _loss_and_gradient(device, logits, dlogits, targets, losses, first, grad, float(softcap))
        if dx is not None:
            target = Epilogue(device.view(dx, (count, c), first * c), alpha)
            if half and in_blocks:
                matmul(device, dlogits, matrix, target, in_blocks=True, splits=splits)
            else:
                _times_weight(device, dlogits, weight, target)
        if dweight is not None:
            _add_to_dweight(device, dlogits, part, dweight, alpha, accumulate=first > 0)
        if dbias is not None:
            sum_rows(device, dlogits, dbias, first > 0)
    if per_target:
        return losses, dx, dweight, dbias
    loss = device.empty((1,))
    device.launch(
        "loss_cross_entropy",
        [memory, targets, losses, loss, None],
        [rows, v, 0, n],
        (1, 1, 1),
        {"L_T": "f32", "WIDTH": 1, "GRAD": False, "HALF": False, "SOFTCAP": 0.0},
        entry="total",
    )
    return loss, dx, dweight, dbias


def _chunk_rows(n: int, most: int) -> int:
    """Rows of a chunk: about `most` or fewer, equally many in each, and a multiple of 128, so that a chunk starts where
    a binding may start, in float16 too."""
    chunks = -(-n // max(128, most // 128 * 128))
    return min(n, -(-n // (128 * chunks)) * 128)


def _chunks_at_once(device: Runtime, n: int, rows: int, v: int) -> int:
    """Return how many of n / rows chunks, if these are whole, are computed at once."""
    fitting = device.max_binding_bytes // (4 * v * rows)
    return next((k for k in range(min(CHUNKS_AT_ONCE, fitting), 1, -1) if n % (rows * k) == 0), 1)


def _loss_and_gradient(
    device: Runtime,
    logits: Array,
    dlogits: Array,
    targets: Array,
    losses: Array,
    first: int,
    grad: bool,
    softcap: float,
) -> None:
    """Write losses, and dlogits: a float16 array, or the memory of the logits."""
    rows, v = logits.shape
    vec, half = v % 4 == 0, dlogits.dtype == np.float16
    switches: dict[str, Constant] = {"GRAD": grad, "HALF": half, **({"SCALE": _HALF_SCALE} if half else {})}
    device.launch(
        "loss_cross_entropy",
        [logits, targets, losses, None, dlogits if half else None],
        [rows, v, first, losses.size],
        device.groups(rows, 1),
        {"L_T": "vec4<f32>" if vec else "f32", "WIDTH": 4 if vec else 1, **switches, "SOFTCAP": softcap},
        work=12.0 * logits.size,
    )


def _times_weight(device: Runtime, dlogits: Array, weight: Array, end: Epilogue) -> None:
    """dlogits weight, with the vocabulary in pieces that fit one binding."""
    (rows, v), c = dlogits.shape, weight.shape[1]
    for lo, hi in device.row_windows(v, c * weight.dtype.itemsize):
        part = device.view(weight, (hi - lo, c), lo * c)
        types = dlogits.dtype.name, part.dtype.name, end.out.dtype.name
        piece = Gemm((rows, c, hi - lo), *types, lda=v, a_column=lo)
        multiply(device, piece, dlogits, part, replace(end, accumulate=lo > 0))


def _add_to_dweight(
    device: Runtime, dlogits: Array, x: Array, dweight: Array, alpha: float, *, accumulate: bool
) -> None:
    """dweight (+)= alpha dlogits^T x."""
    (rows, v), c = dlogits.shape, x.shape[1]
    for lo, hi in device.row_windows(v, c * 4):
        part = device.view(dweight, (hi - lo, c), lo * c)
        types = dlogits.dtype.name, x.dtype.name, part.dtype.name
        piece = Gemm((hi - lo, c, rows), *types, trans_a=True, lda=v, a_column=lo)
        multiply(device, piece, dlogits, x, Epilogue(part, alpha, accumulate=accumulate))
