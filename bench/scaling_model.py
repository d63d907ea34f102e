"""What a step over many ranks would take, from the parts that bench_ranks.py measured on one card and of MPI alone.

    python bench/scaling_model.py [bench/results/ranks.jsonl] [--ranks 2,8,64,512] [--every 1,8,32]

A step of a micro-batch a rank, every rank as fast as the first (weak scaling):

    exchange = read_back(B) + all_reduce(n, B) + upload(B)                         B: bytes of the flat gradient
    time = one + exchange - min((b - 1) / b exchange, one / 2)                     b: buckets that it travels in
    all_reduce(n, B) = 2 (n - 1) / n * B / bandwidth + 2 ceil(log2 n) * latency    reduce-scatter, all-gather; n ranks

All buckets but the last travel while the backward runs, which is half of the arithmetic of a step of QLoRA (2 FLOP a
weight and token of 4) or more. `one` is the step of the first rank alone; read_back and upload are taken between the
sizes that were measured, and for the ranks that were measured so is all_reduce: that prediction stands beside the
measured `weak` step. Latency and bandwidth of other links are assumed, in the table LINKS: the nominal rate, and half
a round trip of common hardware. Where ranks synchronise once in H steps (--every) that is paid once in H, for as many
bytes. What the model leaves out: ranks of unequal speed, other traffic, what MPI's copies take from the host.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS

from wgrad.train.run.buckets import BUCKET_BYTES, MOST

LINKS = {  # name: (seconds of latency, bytes a second)
    "1 Gbit Ethernet": (50e-6, 1e9 / 8),
    "10 Gbit Ethernet": (30e-6, 10e9 / 8),
    "100 Gbit Ethernet": (5e-6, 100e9 / 8),
    "NVLink (450 GB/s)": (5e-6, 450e9),
}
WORTH = 0.95  # efficiency below which less frequent synchronisation is advised


class Parts:
    """The rows of bench_ranks.py, of the last run in the file."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.one = {r["work"]: r for r in rows if r["what"] == "one"}
        self.weak = {r["work"]: r for r in rows if r["what"] == "weak"}
        self.bytes = sorted((r for r in rows if r["what"] == "bytes"), key=lambda r: r["bytes"])

    def seconds(self, name: str, nbytes: float) -> float:
        """Of `name` for so many bytes: straight lines between what was measured, and on from the last two."""
        x = [row["bytes"] for row in self.bytes]
        y = [row[f"{name}_ms"] / 1e3 for row in self.bytes]
        if nbytes <= x[-1] or len(x) < 2:
            return float(np.interp(nbytes, x, y))
        return y[-1] + (y[-1] - y[-2]) / (x[-1] - x[-2]) * (nbytes - x[-1])


def all_reduce(ranks: int, nbytes: float, latency: float, bandwidth: float) -> float:
    """Seconds of a reduce-scatter and an all-gather. Source: Thakur, Rabenseifner and Gropp 2005."""
    return 2 * (ranks - 1) / ranks * nbytes / bandwidth + 2 * math.ceil(math.log2(ranks)) * latency


def step_seconds(parts: Parts, work: str, reduce_seconds: float, every: int = 1) -> float:
    """Mean seconds of a step of which each `every`-th is synchronised."""
    nbytes = parts.weak[work]["gradient_mb"] * 1e6
    exchange = parts.seconds("read_back", nbytes) + reduce_seconds + parts.seconds("upload", nbytes)
    one, hidden = parts.one[work]["ms_per_step"] / 1e3, 0.0
    if every == 1:  # an outer step of several comes after the last
        buckets = max(min(MOST, int(nbytes) // BUCKET_BYTES), 1)
        hidden = min(exchange * (buckets - 1) / buckets, one / 2)
    return one + (exchange - hidden) / every


def measured(parts: Parts, work: str) -> dict[str, Any]:
    """The prediction for the ranks that were measured, from one card and MPI alone, beside the measurement."""
    row = parts.weak[work]
    predicted = step_seconds(parts, work, parts.seconds("all_reduce", row["gradient_mb"] * 1e6))
    return {"ranks": row["ranks"], "predicted_ms": 1e3 * predicted, "measured_ms": row["ms_per_step"],
            "off": 1e3 * predicted / row["ms_per_step"] - 1}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", default=str(RESULTS / "ranks.jsonl"))
    parser.add_argument("--ranks", default="8,64,512")
    parser.add_argument("--every", default="1,8,32")
    args = parser.parse_args()
    parts = Parts([json.loads(line) for line in Path(args.file).read_text().splitlines()])
    ranks, every = ([int(n) for n in text.split(",")] for text in (args.ranks, args.every))
    for work in parts.weak:
        known = measured(parts, work)
        print(f"\n{work}: {known['ranks']} ranks: predicted {known['predicted_ms']:.1f} ms a step, measured "
              f"{known['measured_ms']:.1f} ({known['off']:+.1%})")  # fmt: skip
        print(f"{'link':<20}{'ranks':>6}" + "".join(f"{f'every {h}':>12}" for h in every) + "   (efficiency)")
        alone, nbytes = parts.one[work]["ms_per_step"] / 1e3, parts.weak[work]["gradient_mb"] * 1e6
        for link, (latency, bandwidth) in LINKS.items():
            for count in ranks:
                seconds = all_reduce(count, nbytes, latency, bandwidth)
                shares = [alone / step_seconds(parts, work, seconds, h) for h in every]
                pays = next((h for h, share in zip(every, shares) if share >= WORTH), None)
                advice = "" if shares[0] >= WORTH else f"   synchronise every {pays or f'more than {every[-1]}'} steps"
                print(f"{link:<20}{count:>6}" + "".join(f"{share:>12.3f}" for share in shares) + advice)


if __name__ == "__main__":
    main()
