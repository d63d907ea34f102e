"""Flash attention's backward on the tensor cores. Kernels: attention_backward_dq.hip, _dkv.hip, _rows.hip."""

from __future__ import annotations

from wgrad.device.memory import Array
from wgrad.hip.attention.attention_plain import plain_attention_backward
from wgrad.hip.attention.attention_widths import kernel_width, narrowed, widened
from wgrad.hip.elements import implements
from wgrad.hip.runtime.architectures import dies
from wgrad.hip.runtime.launch import Long
from wgrad.hip.runtime.runtime import Runtime

KINDS = {"float16": "f16", "bfloat16": "bf16"}
_GROUP = 256  # work-items of attention_backward_rows.hip
_LARGEST = 1 << 32  # bytes of a batch element that a kernel's 32-bit offsets reach


@implements("attention_backward")
def attention_backward(
    device: Runtime,
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    doc_start: Array,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Array, Array, Array]:
    """Use the tensor cores where `served`, else the plain kernels."""
    # A tile beyond the end is addressed too: one work-group's rows more.
    if not served((do, q, k, v, o), (q.shape[1] + 256) * q.shape[2], scale, softcap):
        return plain_attention_backward(device, do, q, k, v, o, lse, doc_start, scale, window, softcap)
    narrow = q.shape[3]
    do, q, k, v, o = (widened(device, x, kernel_width(narrow)) for x in (do, q, k, v, o))
    batch, length, heads, width = q.shape
    kv_heads, kind = k.shape[2], KINDS[q.dtype.name]
    columns, threads = columns_of(device.wave, width)
    delta = device.empty(lse.shape)
    # Only float16 needs a bound on ds.
    do_lengths = device.empty(lse.shape) if kind == "f16" else None
    v_lengths = device.empty((batch, kv_heads, length)) if kind == "f16" else None
    _row_dots(device, do, o, delta, do_lengths)
    if v_lengths is not None:
        _row_dots(device, v, None, None, v_lengths)
    dq, dk, dv = (device.empty(a.shape, a.dtype) for a in (q, k, v))
    inputs = [do, q, k, v, lse, delta, do_lengths, v_lengths, doc_start]
    numbers, tail = [length, heads, kv_heads], [window, float(scale)]
    blocks, work = -(-length // columns), 3.0 * q.size * length  # a causal half of 2 products' 2 FLOP, three times
    device.launch(
        "attention_backward_dq", f"attention_backward_dq_{kind}_{width}", [*inputs, dq, *numbers, dies(device), *tail],
        (heads * batch, blocks, 1), threads=threads, work=work,
    )  # fmt: skip
    splits = _splits(device, blocks * batch * kv_heads, heads // kv_heads)
    parts = [device.empty((splits, *k.shape)) for _ in range(2)] if splits > 1 else [dk, dv]
    device.launch(
        "attention_backward_dkv", f"attention_backward_dkv_{kind}_{width}",
        [*inputs, *parts, *numbers, splits, *tail], (kv_heads * splits, batch, blocks), threads=threads,
        work=work * 4 / 3,
    )  # fmt: skip
    if splits > 1:
        for part, out in zip(parts, (dk, dv)):
            arguments = [part, out, Long(out.size), splits]
            groups = device.groups(out.size, _GROUP * 4)
            device.launch(
                "attention_backward_rows", f"attention_sum_parts_{kind}", arguments, groups,
                work=part.nbytes + out.nbytes,
            )  # fmt: skip
    return narrowed(device, dq, narrow), narrowed(device, dk, narrow), narrowed(device, dv, narrow)


def columns_of(wave: int, width: int) -> tuple[int, int]:
    """Rows that a work-group of attention_gradient.hpp owns, and its work-items."""
    columns, threads = (256, 512) if wave == 64 else (64, 128)
    return (columns // 2 if width > 128 else columns), threads


def _row_dots(device: Runtime, x: Array, y: Array | None, dots: Array | None, lengths: Array | None) -> None:
    """dots = sum over the width of x y, lengths = |x|, float32 [B, H, T]; x, y [B, T, H, D]."""
    batch, length, heads, width = x.shape
    rows = batch * length * heads
    arguments = [x, y, dots, lengths, rows, length, heads, width]
    kernel = f"attention_row_dots_{KINDS[x.dtype.name]}"
    groups = device.groups(rows * width // 8, _GROUP)
    device.launch("attention_backward_rows", kernel, arguments, groups, work=x.nbytes * (1 if y is None else 2))


def _splits(device: Runtime, groups: int, per: int) -> int:
    """Number of shares of a key head's query heads: enough for all compute units, none empty."""
    wanted = max(1, min(per, device.compute_units // max(1, groups)))
    return -(-per // -(-per // wanted))


def served(arrays: tuple[Array, ...], rows: int, scale: float, softcap: float) -> bool:
    """Return whether the matrix kernels support these arrays.

    All must have one 16-bit dtype and a supported head width, and be neither empty nor (unless heads are widened, which
    copies) unaligned to 16 bytes. The kernels find the highest score before scaling, so the scale must be positive.

    Args:
        rows: Rows of D elements that a kernel addresses in a batch element, including those beyond the end.
    """
    first = arrays[0]
    alike = all(a.dtype == first.dtype for a in arrays) and first.dtype.name in KINDS
    width = kernel_width(first.shape[3])
    if softcap or not scale > 0 or not alike or not width or not all(a.size for a in arrays):
        return False
    copied = width != first.shape[3]
    return rows * width * 2 < _LARGEST and (copied or all(a.address % 16 == 0 for a in arrays))
