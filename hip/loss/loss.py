"""linear_cross_entropy: head GEMM, loss and both gradients, a chunk of tokens at a time. Kernels: softmax.hip, GEMMs.

The backward is part of the forward, so that logits are never kept.
"""

from __future__ import annotations

from wgrad.device.dry_run import chunk_starts
from wgrad.device.memory import Array
from wgrad.hip.elements import implements
from wgrad.hip.elementwise.elementwise import sum_all, sum_rows
from wgrad.hip.gemm.gemm import Epilogue, dense_product
from wgrad.hip.runtime.runtime import Runtime

# Logits of one chunk. Larger chunks make faster GEMMs; this is small compared with a model and its activations.
CHUNK_BYTES = 128 << 20


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
    rows = min(n, max(128, CHUNK_BYTES // (4 * v) // 128 * 128))
    # The last chunk may be shorter: its logits are a view of the same memory.
    memory = device.empty((rows, v))
    for first in chunk_starts(device, n, rows):
        count = min(rows, n - first)
        part, logits = device.view(x, (count, c), first * c), device.view(memory, (count, v))
        dense_product(device, part, weight, logits, None, Epilogue(bias=bias), trans_b=True)
        arguments = [logits, targets, losses, v, first, int(need_dx or need_dweight or need_dbias), float(softcap)]
        device.launch("softmax", "cross_entropy", arguments, (count, 1, 1), work=3 * logits.nbytes)
        if dx is not None:
            dense_product(device, logits, weight, device.view(dx, (count, c), first * c), None, Epilogue())
        if dweight is not None:
            epilogue = Epilogue(accumulate=first > 0)
            dense_product(device, logits, part, dweight, None, epilogue, trans_a=True)
        if dbias is not None:
            sum_rows(device, logits, dbias, first > 0)
    return losses if per_target else sum_all(device, losses), dx, dweight, dbias
