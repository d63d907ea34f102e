"""GEMMs with frozen weights of every format: microseconds, share of NF4's speed.

    python bench/bench_weights.py [--rows 16,64,128,256,512] [--shape 4096x4096] [--formats q5_k,q6_k] [--sweep]
        [--dtype float32]

All formats with the same rows and direction are timed in turns, each on several weights, which together are about as
large as a cache or larger; each result is checked against float64 on its first rows. --sweep: other tiles of
tensor cores and splits of K next to the chosen ones. --dtype: of x and of the result; tensor cores need float16.
The last lines are the least share of NF4's speed that each format has in these measurements.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from common import Report

from wgrad.autograd.bench import timing
from wgrad.autograd.bench.timing import median_spread
from wgrad.autograd.bind import bind
from wgrad.device.errors import DeviceError
from wgrad.device.formats.frozen_weight import formats
from wgrad.device.formats.gguf_blocks import GgufBlocks
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.gemm import gemm_matrix
from wgrad.wgsl.gemm.gemm import matmul
from wgrad.wgsl.gemm.gemm_epilogue import Epilogue
from wgrad.wgsl.gemm.gemm_matrix import MatrixTile

WEIGHTS = 6  # by turns
CALLS, MANY_ROWS = 48, 1024  # in a recording; of so many rows one for each weight
RANDOM_ROWS = 64  # of a weight, repeated
CHECKED_ROWS = 8
TILES = [
    gemm_matrix.NARROW,
    *dict.fromkeys(tile for tiles in gemm_matrix.WEIGHT_TILES.values() for tile in tiles),
    MatrixTile(2, 4, 2, 1, 2, ahead=True),  # 64 x 128, on eight subgroups as those below
    MatrixTile(4, 2, 1, 2, 2, ahead=True),  # 64 x 128
    MatrixTile(4, 2, 1, 1, 2, ahead=True),  # 64 x 64
    MatrixTile(4, 2, 2, 1, 2, ahead=True),  # 128 x 64
    MatrixTile(2, 4, 4, 1, 2, ahead=True),  # 128 x 128
    MatrixTile(4, 2, 4, 1, 2, ahead=True),  # 256 x 64
]
SPLITS = [1, 2, 4, 8]


@dataclass
class Work:
    """A recording of so many calls. row: what its row begins with."""

    row: dict[str, Any]
    replay: Any
    calls: int
    error: float
    samples: list[float]


class Case:
    """GEMMs of so many rows with weights of one format, forward or dx."""

    def __init__(
        self, device: Any, name: str, shape: tuple[int, int], rows: int, backward: bool, dtype: Any = np.float16
    ) -> None:
        self._device, self._dtype, (n, k) = device, np.dtype(dtype), shape
        weight = quantized(name, shape)
        self._weights = [weight.map_arrays(device.upload) for _ in range(WEIGHTS)]
        inner, outer = (n, k) if backward else (k, n)
        x = np.random.default_rng(1).standard_normal((rows, inner)).astype(dtype)
        decoded = device.download(device.dequantize(self._weights[0])).astype(np.float64)
        self._exact = x[:CHECKED_ROWS].astype(np.float64) @ (decoded if backward else decoded.T)
        self._x, self._out = device.upload(x), device.empty((rows, outer), self._dtype)
        self._mnk, self._backward = (rows, outer, inner), backward
        self.row = {"op": "linear_quantized" + "_backward" * backward, "format": name, "dtype": self._dtype.name,
                    "rows": rows, "n": n, "k": k}  # fmt: skip

    def chosen(self) -> Work:
        """The path that a user gets."""
        call = self._device.linear_quantized_backward if self._backward else self._device.linear_quantized
        return self._record(lambda w: call(self._x, w, dtype=self._dtype), "chosen", 0)

    def others(self) -> list[Work]:
        """The tiles that hold all rows, or the tallest, and are no more than twice as tall."""
        m, _, k = self._mnk
        high = min(m, max(tile.m for tile in TILES))
        found = []
        for tile in TILES:
            if not high <= tile.m <= 2 * high or tile.most_workgroup_bytes > self._device.workgroup_bytes:
                continue
            if tile.n * tile.k % (tile.threads * gemm_matrix.unit_of(self._weights[0], m)):
                continue
            for splits in (s for s in SPLITS if s * tile.k <= k):
                name = f"{tile.m}x{tile.n}x{tile.k}/{tile.sg_m}x{tile.sg_n} subgroups"
                try:
                    found.append(self._record(partial(self._product, tile, splits), name, splits))
                except DeviceError as problem:
                    print("failed", self.row, tile, splits, str(problem)[:200])
        return found

    def _product(self, tile: MatrixTile, splits: int, weight: Any) -> None:
        options: dict[str, Any] = {"trans_b": not self._backward, "tile": tile, "splits": splits}
        matmul(self._device, self._x, weight, Epilogue(self._out), **options)

    def _record(self, call: Callable[[Any], Any], tile: str, splits: int) -> Work:
        out = call(self._weights[0])
        got = self._device.download(self._out if out is None else out)[:CHECKED_ROWS].astype(np.float64)
        error = float(np.linalg.norm(got - self._exact) / np.linalg.norm(self._exact))
        calls = WEIGHTS if self._mnk[0] >= MANY_ROWS else CALLS
        with self._device.capture() as replay:
            for i in range(calls):
                call(self._weights[i % WEIGHTS])
        return Work(self.row | {"tile": tile, "splits": splits}, replay, calls, error, [])


@cache
def quantized(name: str, shape: tuple[int, int]) -> Any:
    """A weight of this format, in main memory."""
    values = np.random.default_rng(0).standard_normal((min(shape[0], RANDOM_ROWS), shape[1])).astype(np.float32)
    kind = formats()[name]
    if issubclass(kind, GgufBlocks):  # to look up a codebook's entries takes long
        return kind.quantize(values).repeated(shape[0])
    return kind.quantize(np.resize(values, shape), 64, name == "nf4")


def measure(device: Any, works: list[Work]) -> None:
    """In turns, after the GPU has been kept busy."""

    def seconds(work: Work, runs: int) -> float:
        begin = time.perf_counter()
        for _ in range(runs):
            work.replay.run()
        device.synchronize()
        return (time.perf_counter() - begin) / runs / work.calls

    begin, once = time.perf_counter(), seconds(works[0], 1)
    while time.perf_counter() - begin < timing.WARM_SECONDS:
        once = seconds(works[0], 1)
    runs = max(1, round(timing.SAMPLE_SECONDS / once / works[0].calls))
    for _ in range(timing.SAMPLES):
        for work in works:
            work.samples.append(seconds(work, runs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=None, help="adapter index or name (default: the best)")
    parser.add_argument("--rows", default="16,64,128,256,512")
    parser.add_argument("--shape", default="4096x4096", help="N x K of the weights")
    parser.add_argument("--formats", default=",".join(formats()), help="beside nf4")
    parser.add_argument("--dtype", default="float16", choices=("float16", "float32"))
    parser.add_argument("--sweep", action="store_true", help="other tiles and splits of K, too")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    n, k = map(int, args.shape.split("x"))
    device: Any = bind(WgpuDevice)(args.device)
    report = Report("weights", device, args.out)
    names = ["nf4", *(name for name in args.formats.split(",") if name != "nf4")]
    least: dict[str, float] = {}
    for rows in map(int, args.rows.split(",")):
        for backward in (False, True):
            cases = [Case(device, name, (n, k), rows, backward, args.dtype) for name in names]
            works = [work for case in cases for work in [case.chosen(), *(case.others() if args.sweep else [])]]
            measure(device, works)
            nf4 = median_spread(works[0].samples).seconds
            for work in works:
                median, spread = median_spread(work.samples)
                report.row(
                    **work.row, us=1e6 * median, spread=spread, of_nf4s_speed=nf4 / median, error=work.error
                )  # fmt: skip
                if work.row["tile"] == "chosen":
                    name = work.row["format"]
                    least[name] = min(nf4 / median, least.get(name, float("inf")))
    for name, share in least.items():
        print(f"{name}: at least {share:.2f} of NF4's speed")


if __name__ == "__main__":
    main()
