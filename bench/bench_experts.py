"""TFLOP/s of GEMMs of experts, and of a dense GEMM of the same arithmetic, in the same run.

    python bench/bench_experts.py [--tokens 2048,8192] [--small] [--out FILE]

Every token chooses its experts evenly at random. The dense GEMM multiplies as many rows with the weight of one expert.
Beyond 512 rows of an expert on average, weights are dequantized first, in either GEMM's time.
apart_tflops: a batched GEMM in which every expert has as many rows. gbytes_per_second: of the weights of the experts
that have rows, each read once.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np
from common import Report, time_device

from wgrad.autograd.bench.cost import product_flop
from wgrad.autograd.bind import bind
from wgrad.device.formats.mxfp4 import Mxfp4Array
from wgrad.device.formats.nf4 import NF4Array, dynamic_map
from wgrad.wgsl.device import WgpuDevice

# Tokens, experts, experts of a token, width of one, hidden size: Qwen3-30B-A3B, OLMoE-1B-7B, Mixtral-8x7B (a quarter).
SHAPES = [(2048, 128, 8, 768, 2048), (2048, 64, 8, 1024, 2048), (2048, 8, 2, 3584, 4096), (16, 128, 8, 768, 2048)]
GPT_OSS = [(2048, 32, 4, 2880, 2880), (16, 32, 4, 2880, 2880)]  # gpt-oss-20B
SMALL = [(16, 3, 2, 32, 64)]


def normal(device: Any, *shape: int) -> Any:
    """Random numbers, a block of which is repeated: that changes no timing."""
    block = np.random.default_rng(1).standard_normal(1 << 20).astype(np.float16 if device.float16 else np.float32)
    return device.upload(np.resize(block, shape))


def weight_of(device: Any, kind: str, rows: int, columns: int, experts: int) -> Any:
    rng, size = np.random.default_rng(1), rows * columns
    if kind == "dense":
        array = normal(device, rows, columns)
        return array if experts == 1 else device.view(array, (experts, rows // experts, columns))
    codes = np.resize(rng.integers(0, 256, 1 << 20).astype(np.uint8), size // 2)
    if kind == "mxfp4":
        return Mxfp4Array(codes, np.full(size // 32, 122, np.uint8), (rows, columns)).map_arrays(device.upload)
    if kind == "nf4 double":  # scales are quantized, too
        scales, outer = np.resize(codes, size // 64), np.full(-(-size // 64 // 256), 0.01, np.float32)
        offset = np.full(1, 0.04, np.float32)
        nested = NF4Array(codes, scales, (rows, columns), 64, outer, dynamic_map().copy(), offset)
        return nested.map_arrays(device.upload)
    absmax = np.resize(rng.random(1 << 16).astype(np.float32), size // 64)
    return NF4Array(codes, absmax, (rows, columns), 64).map_arrays(device.upload)


def measure(device: Any, report: Report, kind: str, shape: tuple[int, int, int, int, int]) -> None:
    tokens, experts, chosen, width, hidden = shape
    ids = np.argsort(np.random.default_rng(0).random((tokens, experts)), axis=1)[:, :chosen].astype(np.int32)
    start, order, _ = device.group_by_expert(device.upload(np.ascontiguousarray(ids)), experts)
    rows, n = tokens * chosen, 2 * width
    x, dy, many = (normal(device, *size) for size in ((tokens, hidden), (rows, n), (rows, hidden)))
    of_all, one = (weight_of(device, kind, count * n, hidden, count) for count in (experts, 1))
    apart: tuple[Any, Any] = None, None
    if kind == "dense":
        dense: Any = partial(device.gemm, many, one, trans_b=True), partial(device.gemm, dy, one)
        if rows % experts == 0:
            a, b = (device.view(array, (experts, rows // experts, array.shape[1])) for array in (many, dy))
            apart = partial(device.gemm, a, of_all, trans_b=True), partial(device.gemm, b, of_all)
        nbytes = of_all.nbytes
    else:
        dense = partial(device.linear_quantized, many, one), partial(device.linear_quantized_backward, dy, one)
        nbytes = sum(array.nbytes for array in of_all.arrays().values() if array is not None)
    grouped = (
        partial(device.grouped_linear, x, of_all, start, order=order),
        partial(device.grouped_linear_backward, dy, of_all, start),
    )
    flop, read = product_flop(rows, n, hidden), nbytes * np.unique(ids).size / experts
    for side, ours, other, alone in zip(("forward", "dx"), grouped, dense, apart):
        experts_time, dense_time = time_device(device, ours), time_device(device, other)
        of_each = {} if alone is None else {"apart_tflops": flop / time_device(device, alone).seconds / 1e12}
        report.row(
            kind=kind,
            side=side,
            shape="x".join(map(str, shape)),
            rows_of_expert=rows / experts,
            dtype=x.dtype_name,
            tensor_cores=device.matrix_units,
            us=experts_time.seconds * 1e6,
            tflops=flop / experts_time.seconds / 1e12,
            dense_tflops=flop / dense_time.seconds / 1e12,
            ratio=dense_time.seconds / experts_time.seconds,
            **of_each,
            gbytes_per_second=read / experts_time.seconds / 1e9,
            spread=max(experts_time.spread, dense_time.spread),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="sizes that time nothing")
    parser.add_argument("--tokens", help="so many each time, such as 320,640")
    parser.add_argument("--out", help="write the rows here")
    args = parser.parse_args()
    device: Any = bind(WgpuDevice)()
    report = Report("experts", device, args.out)
    shapes, gpt_oss = (SMALL, SMALL) if args.small else (SHAPES, GPT_OSS)
    if args.tokens:
        counts = list(map(int, args.tokens.split(",")))
        models = shapes[:3], gpt_oss[:1]
        shapes, gpt_oss = ([(count, *shape[1:]) for count in counts for shape in of] for of in models)
    for shape in shapes:
        for kind in ("dense", "nf4", "nf4 double"):
            measure(device, report, kind, shape)
    for shape in gpt_oss:
        measure(device, report, "mxfp4", shape)


if __name__ == "__main__":
    main()
