"""The memory-bound kernels as compiled: the committed table keeps its bars."""

from __future__ import annotations

import pytest

from tests.autograd.norms import NORMS
from tests.hip.executor.table import Row, held

# What reads a number here and there (positions, chains, block sums); all other kernels stream through large arrays.
SPARSE = {"clip", "embedding_chains", "grad_norm_total", "nf4_mean", "nf4_nest", "sum"}
# Kernels whose results are small beside what they read, by how their names end.
REDUCING = ("_dweight", "sum_rows", "sample")
# Beside codes, which are few bytes, a scale for each block is read or written; beside short rows up to two statistics.
SHARE = {"nf4_quantize": 0.6, "nf4_dequantize": 0.45, **{f"{norm}_row16": 0.65 for norm in NORMS}}


def moved(row: Row, direction: str) -> list[tuple[str, int, int]]:
    """Return for each element type its name, the traffic in accesses of at least 64 bits, and all traffic."""
    found = []
    for name, counts in row["executed"].items():
        sizes = [(int(key.split()[1]), n) for key, n in counts.items() if key.startswith(direction)]
        found.append((name, sum(w * n for w, n in sizes if w >= 64), sum(w * n for w, n in sizes)))
    return found


def test_nothing_spills() -> None:
    with held("hip_isa_memory") as rows:
        assert [(r["arch"], r["kernel"]) for r in rows if r["spills"] or r["scratch"]] == []


def test_reductions_leave_lds_alone() -> None:
    """Lanes of a wave talk by DPP and through scalar registers."""
    with held("hip_isa_memory") as rows:
        assert [(r["arch"], r["kernel"]) for r in rows if r["lds_shuffles"]] == []


@pytest.mark.parametrize("direction", ["load", "store"])
def test_streams_are_wide(direction: str) -> None:
    """Four fifths of the bytes of a streaming kernel on aligned arrays go by 64 bits or more.

    An access counts as if all lanes made it: a number that few lanes write weighs as much as a stream.
    """

    def streams(row: Row) -> bool:
        small = direction == "store" and row["kernel"].endswith(REDUCING)
        return "executed" in row and row["kernel"] not in SPARSE and not small

    with held("hip_isa_memory", streams) as rows:
        narrow = [
            (r["arch"], r["kernel"], *m)
            for r in rows
            for m in moved(r, direction)
            if m[1] < SHARE.get(r["kernel"], 0.8) * m[2]
        ]
        assert narrow == []


def test_large_arrays_go_by_128_bits() -> None:
    """No load or store of another width at all in what only streams."""
    only = {"activation", "elementwise", "dropout", "embedding", "softmax", "softmax_backward", "copy", "kv_append",
            "adamw"}  # fmt: skip
    with held("hip_isa_memory", lambda r: r["kernel"] in only and "executed" in r) as rows:
        widths = {(r["arch"], r["kernel"], key) for r in rows for counts in r["executed"].values() for key in counts}
        assert {key for *_, key in widths} <= {"load 128", "store 128"}, [w for w in widths if "128" not in w[2]]
