"""Reference embedding and the cross-entropy of a linear layer, with their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.reference_base import compute_dtype, finish, operator, up

IGNORE_INDEX = -100
# Logits of one chunk of tokens: at most this many elements (a single token is always taken).
LOGIT_ELEMENTS = 1 << 22


class ReferenceLoss:
    @operator
    def embedding(self, table: np.ndarray, ids: np.ndarray, *, dtype: Any = np.float32) -> np.ndarray:
        compute = compute_dtype(table)
        return finish(up(table[ids], compute), dtype, compute)

    @operator
    def embedding_backward(self, dy: np.ndarray, ids: np.ndarray, vocab_size: int) -> np.ndarray:
        compute = compute_dtype(dy)
        dtable = np.zeros((vocab_size, dy.shape[1]), compute)
        if ids.size:
            order = np.argsort(ids, kind="stable")
            rows, first = np.unique(ids[order], return_index=True)
            dtable[rows] = np.add.reduceat(up(dy, compute)[order], first, axis=0)
        return dtable

    @operator
    def linear_cross_entropy(
        self,
        x: np.ndarray,
        weight: np.ndarray,
        targets: np.ndarray,
        *,
        need_dx: bool = True,
        need_dweight: bool = False,
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        compute = compute_dtype(x, weight)
        wide, table = up(x, compute), up(weight, compute)
        dx = np.zeros(x.shape, compute) if need_dx else None
        dweight = np.zeros(weight.shape, compute) if need_dweight else None
        loss = np.zeros(1, np.float64)
        counted = np.flatnonzero(targets != IGNORE_INDEX)
        step = max(1, LOGIT_ELEMENTS // table.shape[0])
        for start in range(0, counted.size, step):
            rows = counted[start : start + step]
            logits = wide[rows] @ table.T
            own = (np.arange(rows.size), targets[rows])
            logits -= logits.max(axis=1, keepdims=True)
            at_target = logits[own]
            p = np.exp(logits, out=logits)
            total = p.sum(axis=1, keepdims=True)
            loss += np.sum(np.log(total[:, 0]) - at_target, dtype=np.float64)
            p /= total
            p[own] -= 1  # now d loss / d logits
            if dx is not None:
                dx[rows] = p @ table
            if dweight is not None:
                dweight += p.T @ wide[rows]
        return loss.astype(compute), dx, dweight
