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
def keep_experts(args: Args, start: Array, held: Array, used: Array, counts: Array, counted: bool) -> None:
    """Keep experts with most rows in slots. start int32 [E + 1]: expert e has the rows from start[e] to start[e + 1]
    -> origins int32 [E, 2] for `gather_experts`: the slot that an expert is in, -1 if it is in none or -2 if it has no
    rows, and the slot that it has to enter or -1.

    held, used and counts as in `place_experts`; counts[1:] change only if `counted`. The S experts with most rows, of
    equal ones those used last, then the first ones, are kept, if they have rows or are in a slot. Those that enter, in
    their order, take the slots of the others and empty ones."""
    args.array("start", start, "bounds", "i32").array("held", held, "S", "i32").array("used", used, "S", "i32")
    args.array("counts", counts, "3", "i32")
    experts, slots = args.size["bounds"] - 1, args.size["S"]
    args.rule(0 < experts <= MOST_EXPERTS, f"start must have the bounds of 1 to {MOST_EXPERTS} experts, got {experts}")
    args.rule(slots <= experts, f"held must have at most {experts} slots, one for each expert, got {slots}")


@keep_experts.reference
def _(start: np.ndarray, held: np.ndarray, used: np.ndarray, counts: np.ndarray, counted: bool) -> np.ndarray:
    rows, there = np.diff(start), np.flatnonzero(held >= 0)
    experts = np.arange(rows.size)
    place, last = np.full(rows.size, -1), np.zeros(rows.size, np.int64)
    place[held[there]], last[held[there]] = there, used[there] + 1
    counts += np.array([1, counted * np.sum(rows > 0), counted * np.sum((rows > 0) & (place < 0))], np.int32)
    best = np.lexsort((experts, -last, -rows))[: held.size]
    kept = np.isin(experts, best) & ((rows > 0) | (place >= 0))
    enters = np.flatnonzero(kept & (place < 0))
    free = np.flatnonzero((held < 0) | ~kept[held])[: enters.size]
    origins = np.full((rows.size, 2), -1, np.int32)
    origins[:, 0] = np.where(rows == 0, -2, np.where(kept, place, -1))
    origins[enters, 1] = free
    held[free] = enters
    used[(held >= 0) & (rows[held] > 0)] = counts[0]
    return origins


@operator
def gather_experts(
    args: Args, origins: Array, source: Array, kept: Array, slots: int, out: Array | None = None
) -> None:
    """Copy experts by origins int32 [E, 2] of `keep_experts`, from the E equal parts of source or the `slots` parts of
    kept. Expert e comes from part origins[e, 0] of kept, or with -1 from its part of source, and is copied to its part
    of out, if that is given, and to part origins[e, 1] of kept unless that is negative."""
    args.array("origins", origins, "E 2", "i32")
    arrays = {"kept": kept} | ({} if out is None else {"out": out})
    for name, array in arrays.items():
        args.rule(source.dtype == array.dtype, f"{name} must have source's dtype {source.dtype}, got {array.dtype}")
        _equal_parts(args, source, args.size["E"], name, array, slots if name == "kept" else args.size["E"])


@gather_experts.reference
def _(origins: np.ndarray, source: np.ndarray, kept: np.ndarray, slots: int, out: np.ndarray | None) -> None:
    parts, slot_parts = source.reshape(len(origins), -1), kept.reshape(slots, -1)
    if out is not None:
        places = out.reshape(len(origins), -1)
        of_kept, of_source = (origins[:, 0] >= 0), (origins[:, 0] == -1)
        places[of_kept], places[of_source] = slot_parts[origins[of_kept, 0]], parts[of_source]
    enters = origins[:, 1] >= 0
    slot_parts[origins[enters, 1]] = parts[enters]


def _equal_parts(args: Args, source: Array, experts: int, name: str, array: Array, parts: int) -> None:
    """Check that source has `experts` parts and the array called `name` as many as `parts` of the same size."""
    size, rest = divmod(source.size, experts)
    args.rule(
        not rest and array.size == size * parts,
        f"source and {name} must have {experts} and {parts} parts of one size, got {source.size} and {array.size} "
        "numbers",
    )
    nbytes = size * source.dtype.itemsize
    args.rule(nbytes % 4 == 0, f"a part must have whole words of 4 bytes, got {nbytes} bytes")


@operator
def copy_experts(args: Args, copies: Array, source: Array, out: Array, experts: int, slots: int) -> None:
    """For each pair (expert, slot) of copies int32 [N, 2], copy part `expert` of the `experts` equal parts of source to
    part `slot` of the `slots` parts of out, in place. A pair with a negative expert is left out."""
    args.array("copies", copies, "N 2", "i32")
    args.rule(source.dtype == out.dtype, f"out must have source's dtype {source.dtype}, got {out.dtype}")
    _equal_parts(args, source, experts, "out", out, slots)


@copy_experts.reference
def _(copies: np.ndarray, source: np.ndarray, out: np.ndarray, experts: int, slots: int) -> None:
    there = copies[copies[:, 0] >= 0]
    out.reshape(slots, -1)[there[:, 1]] = source.reshape(experts, -1)[there[:, 0]]
