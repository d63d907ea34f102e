"""Predict steps on more GPUs from the parts that bench_ranks.py measured with a few.

    python bench/predict_ranks.py [--results bench/results/ranks-h200-x2.jsonl] [--network 12.5] [--gpus 2,8,64]

A host has eight GPUs. All ranks of a host sum a bucket of the gradient in its memory, one rank of each sums it between
hosts, and the backward goes on meanwhile. Taken from the results: the step of a rank alone whose gradient goes to the
host and back, the end of each part of the backward, the buckets' bytes, the time that ranks wait for each other, the
rate of sums in a host's memory, and the time of MPI's sum of each bucket. Assumed: a network of --network GB/s between
hosts, each way, and that the sums of eight ranks are as fast as those of two: each rank adds up an eighth of a bucket.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
GPUS_OF_A_HOST = 8


@dataclass(frozen=True)
class Parts:
    """Measured parts of a step. Times in ms, rates in bytes/ms.

    Attributes:
        one: A rank alone.
        through: The same with its gradient going to the host and back.
        wait: For other ranks, in a step.
        backward: Of each part of the backward, at whose end a bucket is complete.
        buckets: Bytes.
        ranks: Ranks with which sums were measured.
        host_rate: Of a sum of two ranks in a host's memory.
        mpi: Of MPI's sum of two ranks, for each bucket.
    """

    one: float
    through: float
    wait: float
    backward: Sequence[float]
    buckets: Sequence[float]
    ranks: int
    host_rate: float
    mpi: Sequence[float]


def read(rows: Sequence[dict[str, Any]], work: str) -> Parts:
    """Return the measured parts of a step of `work`."""
    of_work = {row["what"]: row for row in rows if row.get("work") == work}
    one, through, parts = (of_work[what] for what in ("one", "through", "parts"))
    mpi = {row["bytes"]: row["all_reduce_ms"] for row in rows if row["what"] == "bytes"}
    return Parts(
        one["ms_per_step"],
        through["ms_per_step"],
        parts["wait_ms"],
        through["backward_ms"],
        through["bucket_bytes"],
        one["ranks"],
        1e6 * parts["sum_gb_per_second"],
        [mpi[nbytes] for nbytes in through["bucket_bytes"]],
    )


def step_ms(parts: Parts, gpus: int, network: float) -> float:
    """Return the milliseconds of a step with a micro-batch on each GPU. network: GB/s of a host each way."""
    hosts, local = -(-gpus // GPUS_OF_A_HOST), min(gpus, GPUS_OF_A_HOST)
    # A rank reads its slice of all ranks and writes the sum: 1 + 1 / ranks of a bucket.
    traffic = (1 + 1 / local) / (1 + 1 / parts.ranks)
    shares = 2 * (hosts - 1) / hosts  # of a bucket, that each host sends: of two hosts a whole one
    scale = parts.through / sum(parts.backward)  # timed part by part, they take longer
    summed = sent = ready = 0.0
    for end, nbytes, mpi in zip(accumulate(parts.backward), parts.buckets, parts.mpi, strict=True):
        ready = end * scale
        summed = max(summed, ready) + traffic * nbytes / parts.host_rate
        sent = max(sent, summed) + shares * max(mpi, nbytes / 1e6 / network)
    return parts.through + parts.wait + sent - ready


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", default=str(RESULTS / "ranks-h200-x2.jsonl"))
    parser.add_argument("--network", type=float, default=12.5)
    parser.add_argument("--gpus", default="2,8,64")
    args = parser.parse_args()
    rows = [json.loads(line) for line in Path(args.results).read_text(encoding="utf-8").splitlines()]
    print("| work | GPUs | ms a step | times one GPU | measured |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for work in dict.fromkeys(row["work"] for row in rows if row["what"] == "through"):
        parts = read(rows, work)
        measured = {
            row["ranks"]: row["ms_per_step"] for row in rows if (row["what"], row.get("work")) == ("weak", work)
        }
        for gpus in map(int, args.gpus.split(",")):
            taken, seen = step_ms(parts, gpus, args.network), measured.get(gpus)
            speedup = gpus * parts.one / taken
            print(f"| {work} | {gpus} | {taken:.1f} | {speedup:.2f} | {f'{seen:.1f}' if seen else '–'} |")


if __name__ == "__main__":
    main()
