"""Model of a step over many ranks, from the parts that bench_ranks.py measured on one card and of sums alone.

    python bench/scaling_model.py [bench/results/ranks.jsonl] [--ranks 8,64,512] [--every 1,8,32] [--bits 16]

A step of a micro-batch a rank, every rank as fast as the first (weak scaling). It is `through`, the measured step of
one card whose gradient goes to the host and back with nobody there to add anything, and what adding up prolongs it by,
which a simulation of the buckets' way tells (`finished`): a bucket is on the host when the backward has passed its
layers; there one thread reads it, adds up its slice and sends the sum back, one thing at a time; a network takes one
bucket after another beside that. So what is hidden, and what is left when the backward ends, is no assumption.

    time = through + finished(with sums) - finished(without)
    a sum in a host's memory, read_back and upload: between the sizes that were measured
    all_reduce(n, B) = 2 (n - 1) / n * B / bandwidth + 2 ceil(log2 n) * latency    reduce-scatter, all-gather; n hosts

For the ranks that were measured the prediction stands beside their `weak` step. The links' latency and bandwidth are
assumed, in the table LINKS: the nominal rate, and half a round trip of common hardware; a rank a host. Where ranks
synchronise once in H steps (--every) the step between is `one`, and as many bytes travel at once, in float64. What the
model leaves out: ranks of unequal speed, which wait for the slowest of each step, and other traffic.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS

LINKS = {  # name: (seconds of latency, bytes a second)
    "1 Gbit Ethernet": (50e-6, 1e9 / 8),
    "10 Gbit Ethernet": (30e-6, 10e9 / 8),
    "100 Gbit Ethernet": (5e-6, 100e9 / 8),
    "NVLink (450 GB/s)": (5e-6, 450e9),
}
WORTH = 0.95  # efficiency below which less frequent synchronisation is advised
Cost = Callable[[float], float]  # bytes -> seconds


class Parts:
    """The rows of bench_ranks.py, of the last run in the file."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        def last(what: str) -> dict[str, dict[str, Any]]:
            return {r["work"]: r for r in rows if r["what"] == what}

        self.one, self.through, self.weak = last("one"), last("through"), last("weak")
        self.bytes = sorted({r["bytes"]: r for r in rows if r["what"] == "bytes"}.values(), key=lambda r: r["bytes"])

    def cost(self, name: str) -> Cost:
        """Interpolate the times of `name`: straight lines between what was measured; beyond, as many bytes a second as
        of the most."""
        x = [row["bytes"] for row in self.bytes]
        y = [row[f"{name}_ms"] / 1e3 for row in self.bytes]

        def seconds(nbytes: float) -> float:
            return float(np.interp(nbytes, x, y)) * max(nbytes / x[-1], 1)

        return seconds


def all_reduce(ranks: int, nbytes: float, latency: float, bandwidth: float) -> float:
    """Seconds of a reduce-scatter and an all-gather. Source: Thakur, Rabenseifner and Gropp 2005."""
    return 2 * (ranks - 1) / ranks * nbytes / bandwidth + 2 * math.ceil(math.log2(ranks)) * latency


def finished(there: Sequence[float], sizes: Sequence[float], read: Cost, add: Cost, link: Cost, send: Cost) -> float:
    """When the last bucket is sent back to the device. there: when the device is done with each, of so many bytes."""
    host = network = 0.0
    reads, sends = list(zip(there, sizes)), list[tuple[float, float]]()
    while reads or sends:
        if sends and (not reads or max(sends[0][0], host) <= max(reads[0][0], host)):
            due, nbytes = sends.pop(0)
            host = max(host, due) + send(nbytes)
        else:
            due, nbytes = reads.pop(0)
            host = max(host, due) + read(nbytes) + add(nbytes)
            network = max(network, host) + link(nbytes)
            sends.append((network, nbytes))
    return host


def free(nbytes: float) -> float:
    return 0.0


def step_seconds(parts: Parts, work: str, add: Cost, link: Cost) -> float:
    """A step that is synchronised."""
    row, one = parts.through[work], parts.one[work]["ms_per_step"]
    # Stretches were timed one by one, the device idle between them: in a step as it is they follow each other.
    scale = (one - row["update_ms"]) / sum(row["backward_ms"]) / 1e3
    there = [scale * milliseconds for milliseconds in accumulate(row["backward_ms"])]
    read, send, sizes = parts.cost("read_back"), parts.cost("upload"), row["bucket_bytes"]
    more = finished(there, sizes, read, add, link, send) - finished(there, sizes, read, free, free, send)
    return float(row["ms_per_step"]) / 1e3 + more


def mean_seconds(parts: Parts, work: str, link: Cost, every: int) -> float:
    """Mean of steps of which each `every`-th is synchronised."""
    if every == 1:
        return step_seconds(parts, work, free, link)
    one, nbytes = parts.one[work]["ms_per_step"] / 1e3, sum(parts.through[work]["bucket_bytes"])
    return float(one + (parts.cost("read_back")(nbytes) + link(2 * nbytes) + parts.cost("upload")(nbytes)) / every)


def measured(parts: Parts, work: str) -> dict[str, Any]:
    """The prediction for the ranks that were measured, from one card and sums alone, beside the measurement."""
    row = parts.weak[work]
    predicted = step_seconds(parts, work, parts.cost("exchange"), free)
    return {"ranks": row["ranks"], "predicted_ms": 1e3 * predicted, "measured_ms": row["ms_per_step"],
            "off": 1e3 * predicted / row["ms_per_step"] - 1}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", default=str(RESULTS / "ranks.jsonl"))
    parser.add_argument("--ranks", default="8,64,512")
    parser.add_argument("--every", default="1,8,32")
    parser.add_argument("--bits", type=int, default=32, choices=(16, 32), help="--exchange-bits of the run")
    args = parser.parse_args()
    parts = Parts([json.loads(line) for line in Path(args.file).read_text().splitlines()])
    ranks, every = ([int(n) for n in text.split(",")] for text in (args.ranks, args.every))
    for work in parts.weak:
        if work not in parts.through:
            print(f"{work}: was measured before bench_ranks.py had `through`: measure it again")
            continue
        known = measured(parts, work)
        print(f"\n{work}: {known['ranks']} ranks: predicted {known['predicted_ms']:.1f} ms a step, measured "
              f"{known['measured_ms']:.1f} ({known['off']:+.1%})")  # fmt: skip
        print(f"{'link':<20}{'ranks':>6}" + "".join(f"{f'every {h}':>12}" for h in every) + "   (efficiency)")
        alone = parts.one[work]["ms_per_step"] / 1e3
        for link, (latency, bandwidth) in LINKS.items():
            for count in ranks:
                shares = []
                for h in every:
                    bits = args.bits if h == 1 else 32

                    def cost(nbytes: float) -> float:
                        return all_reduce(count, nbytes * bits / 32, latency, bandwidth)  # noqa: B023

                    shares.append(alone / mean_seconds(parts, work, cost, h))
                pays = next((h for h, share in zip(every, shares) if share >= WORTH), None)
                advice = "" if shares[0] >= WORTH else f"   synchronise every {pays or f'more than {every[-1]}'} steps"
                print(f"{link:<20}{count:>6}" + "".join(f"{share:>12.3f}" for share in shares) + advice)


if __name__ == "__main__":
    main()
