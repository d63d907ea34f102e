"""Flash attention's backward on the matrix units. Kernels: attention_backward_dq.hip, _dkv.hip, _rows.hip."""

from __future__ import annotations

from wgrad.device.memory import Array
from wgrad.hip.attention_plain import PlainAttentionOps
from wgrad.hip.runtime.runtime import Long

WIDTHS = (64, 128)
KINDS = {"float16": "f16", "bfloat16": "bf16"}
_GROUP = 256  # work-items of attention_backward_rows.hip
_LARGEST = 1 << 32  # bytes of a batch element that a kernel's 32-bit offsets reach


class AttentionBackwardOps(PlainAttentionOps):
    """attention_backward (device/contract.py): float16 and bfloat16 with heads of 64 or 128 elements on the matrix
    units; what they do not serve (float32, other widths, arrays that are not aligned to 16 bytes) by the plain kernels.
    """

    def attention_backward(
        self,
        do: Array,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        lse: Array,
        doc_start: Array,
        *,
        scale: float,
        window: int = 0,
    ) -> tuple[Array, Array, Array]:
        """-> dq, dk, dv (shapes and dtypes of q, k, v). T = S and cache_len = 0. Deterministic: no atomics."""
        # A tile beyond the end is addressed too: one work-group's rows more.
        if not served((do, q, k, v, o), (q.shape[1] + 256) * q.shape[2]):
            return super().attention_backward(do, q, k, v, o, lse, doc_start, scale=scale, window=window)
        batch, length, heads, width = q.shape
        kv_heads, kind = k.shape[2], KINDS[q.dtype.name]
        columns, threads = (256, 512) if self.wave == 64 else (64, 128)  # attention_gradient.hpp
        delta = self.empty(lse.shape)
        # How far ds can go is only asked for float16.
        do_lengths = self.empty(lse.shape) if kind == "f16" else None
        v_lengths = self.empty((batch, kv_heads, length)) if kind == "f16" else None
        self._row_dots(do, o, delta, do_lengths)
        if v_lengths is not None:
            self._row_dots(v, None, None, v_lengths)
        dq, dk, dv = (self.empty(a.shape, a.dtype) for a in (q, k, v))
        inputs = [do, q, k, v, lse, delta, do_lengths, v_lengths, doc_start]
        numbers, tail = [length, heads, kv_heads], [int(window), float(scale)]
        blocks, work = -(-length // columns), 3.0 * q.size * length  # a causal half of 2 products' 2 FLOP, three times
        self.launch(
            "attention_backward_dq", f"attention_backward_dq_{kind}_{width}", [*inputs, dq, *numbers, *tail],
            (heads, batch, blocks), threads=threads, work=work,
        )  # fmt: skip
        splits = self._splits(blocks * batch * kv_heads, heads // kv_heads)
        parts = [self.empty((splits, *k.shape)) for _ in range(2)] if splits > 1 else [dk, dv]
        self.launch(
            "attention_backward_dkv", f"attention_backward_dkv_{kind}_{width}",
            [*inputs, *parts, *numbers, splits, *tail], (kv_heads * splits, batch, blocks), threads=threads,
            work=work * 4 / 3,
        )  # fmt: skip
        if splits > 1:
            for part, out in zip(parts, (dk, dv)):
                arguments = [part, out, Long(out.size), splits]
                groups = self.groups(out.size, _GROUP * 4)
                self.launch(
                    "attention_backward_rows", f"attention_sum_parts_{kind}", arguments, groups,
                    work=part.nbytes + out.nbytes,
                )  # fmt: skip
        return dq, dk, dv

    def _row_dots(self, x: Array, y: Array | None, dots: Array | None, lengths: Array | None) -> None:
        """dots = sum over the width of x y, lengths = |x|, float32 [B, H, T]; x, y [B, T, H, D]."""
        batch, length, heads, width = x.shape
        rows = batch * length * heads
        arguments = [x, y, dots, lengths, rows, length, heads, width]
        kernel = f"attention_row_dots_{KINDS[x.dtype.name]}"
        groups = self.groups(rows * width // 8, _GROUP)
        self.launch("attention_backward_rows", kernel, arguments, groups, work=x.nbytes * (1 if y is None else 2))

    def _splits(self, groups: int, per: int) -> int:
        """Shares of a key head's query heads, none empty: until every compute unit has work."""
        wanted = max(1, min(per, self.compute_units // max(1, groups)))
        return -(-per // -(-per // wanted))


def served(arrays: tuple[Array, ...], rows: int) -> bool:
    """Can the matrix kernels take these? Of one 16-bit dtype and a width of WIDTHS, aligned to 16 bytes, not empty.

    rows: of D elements that a kernel addresses in a batch element, those beyond the end too.
    """
    first = arrays[0]
    alike = all(a.dtype == first.dtype for a in arrays) and first.dtype.name in KINDS
    if not alike or first.shape[3] not in WIDTHS or not all(a.size for a in arrays):
        return False
    return rows * first.shape[3] * 2 < _LARGEST and all(a.address % 16 == 0 for a in arrays)
