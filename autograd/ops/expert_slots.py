"""A cache of experts: the weights of those used last lie in slots, and a missing one takes the slot that was unused for
longest. The host never learns which experts are there. No gradient.
"""

from __future__ import annotations

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.operators import operator
from wgrad.autograd.ops.routing import MOST_EXPERTS
from wgrad.device.contract import Array


@operator
def place_experts(args: Args, ids: Array, held: Array, used: Array, counts: Array, experts: int) -> None:
    """ids int32 [T, k], below `experts` -> slots int32 [T, k] of these experts, and copies int32 [T k, 2]: the pairs of
    expert and slot that `copy_experts` has to copy, then pairs of -1.

    In place, held int32 [S] has the expert in each slot or -1, used int32 [S] the call that used it last, and counts
    int32 [3] the numbers of calls, of different experts that the calls had, and of those that were missing. Missing
    experts, in their order, take the slots without an expert of ids in the order of their last use."""
    args.array("ids", ids, "T k", "i32").array("held", held, "S", "i32").array("used", used, "S", "i32")
    args.array("counts", counts, "3", "i32")
    args.rule(0 < experts <= MOST_EXPERTS, f"experts must be from 1 to {MOST_EXPERTS}, got {experts}")
    slots, chosen = args.size["S"], args.size["T"] * args.size["k"]
    args.rule(chosen <= slots <= experts, f"held must have {chosen} (ids) to {experts} (experts) slots, got {slots}")


@place_experts.reference
def _(
    ids: np.ndarray, held: np.ndarray, used: np.ndarray, counts: np.ndarray, experts: int
) -> tuple[np.ndarray, np.ndarray]:
    chosen = np.unique(ids)
    missing = chosen[~np.isin(chosen, held)]
    free = np.flatnonzero(~np.isin(held, chosen))
    taken = free[np.argsort(used[free], kind="stable")][: missing.size]
    held[taken] = missing
    counts += np.array([1, chosen.size, missing.size], np.int32)
    used[np.isin(held, chosen)] = counts[0]
    copies = np.full((ids.size, 2), -1, np.int32)
    copies[: missing.size] = np.stack([missing, taken], axis=1)
    places = np.zeros(experts, np.int32)
    places[held[held >= 0]] = np.flatnonzero(held >= 0)
    return places[ids], copies


@operator
def copy_experts(args: Args, copies: Array, source: Array, out: Array, experts: int, slots: int) -> None:
    """For each pair (expert, slot) of copies int32 [N, 2], copy part `expert` of the `experts` equal parts of source to
    part `slot` of the `slots` parts of out, in place. A pair with a negative expert is left out."""
    args.array("copies", copies, "N 2", "i32")
    args.rule(source.dtype == out.dtype, f"out must have source's dtype {source.dtype}, got {out.dtype}")
    size, rest = divmod(source.size, experts)
    args.rule(
        not rest and out.size == size * slots,
        f"source and out must have {experts} and {slots} parts of one size, got {source.size} and {out.size} numbers",
    )
    nbytes = size * source.dtype.itemsize
    args.rule(nbytes % 4 == 0, f"a part must have whole words of 4 bytes, got {nbytes} bytes")


@copy_experts.reference
def _(copies: np.ndarray, source: np.ndarray, out: np.ndarray, experts: int, slots: int) -> None:
    there = copies[copies[:, 0] >= 0]
    out.reshape(slots, -1)[there[:, 1]] = source.reshape(experts, -1)[there[:, 0]]
