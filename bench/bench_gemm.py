"""TFLOP/s of gemm and of the NF4 GEMM, by tile, and of 8 bits; torch in the same type (cuBLAS) in the same run.

    python bench/bench_gemm.py [--device wgpu] [--compute float16] [--sweep] [--out FILE]

float16: gemm alone, on tensor cores where they are on; every result goes to the same array.

Each timed result is checked against float64 first, on a few rows.
"""

# mypy: disable-error-code="arg-type"
from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import numpy as np
from common import Report, has_cuda, time_device, time_torch

from wgrad.autograd.bench.cost import product_flop
from wgrad.autograd.bind import bind
from wgrad.device.contract import Array
from wgrad.device.errors import DeviceError
from wgrad.device.formats.nf4 import NF4Array
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.gemm import gemm_int8, gemm_matrix
from wgrad.wgsl.gemm.gemm import matmul
from wgrad.wgsl.gemm.gemm_epilogue import Epilogue
from wgrad.wgsl.gemm.gemm_matrix import MatrixTile
from wgrad.wgsl.gemm.gemm_tile import FLAT_SKINNY, TALL_SKINNY, Tile, choose_tile

SQUARE = [("nn", 4096, 4096, 4096), ("nt", 4096, 4096, 4096), ("tn", 4096, 4096, 4096)]
# SmolLM2-135M, Llama-3.2-1B and Llama-3.1-8B at 2048 tokens: projections, head
MODEL = [
    ("nt", 2048, 576, 576),
    ("nt", 2048, 192, 576),
    ("nt", 2048, 1536, 576),
    ("nt", 2048, 576, 1536),
    ("nt", 2048, 8192, 2048),
    ("nt", 2048, 4096, 14336),
    ("nt", 512, 49152, 576),
    ("nn", 512, 576, 49152),
    ("nn", 256, 2048, 128256),
    ("nt", 2048, 16, 576),
    ("nn", 2048, 16, 1536),
    ("tn", 576, 16, 2048),
    ("tn", 16, 1536, 2048),
]
# linear_nf4: [2048, K] times a weight [N, K] of the three models
NF4 = [(2048, n, k) for n, k in (
    (576, 576), (192, 576), (1536, 576), (576, 1536),
    (2048, 2048), (512, 2048), (8192, 2048), (2048, 8192),
    (4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336),
)]  # fmt: skip
SWEEP_TILES = [
    Tile(m, n, k, 2, 2)
    for m, n, k in ((128, 128, 16), (64, 128, 16), (128, 64, 16), (64, 64, 16), (64, 128, 8), (128, 128, 8))
]
# On tensor cores: of 24,576 bytes of workgroup memory or less, two workgroups run at once on an H200's compute unit.
UNITS_TILES = [
    gemm_matrix.LARGE,
    gemm_matrix.MEDIUM,
    *(MatrixTile(2, 2, 4, 4, 1, ahead=ahead) for ahead in (True, False)),  # 128 x 128
    *(MatrixTile(2, 4, 4, 2, 1, ahead=ahead) for ahead in (True, False)),
    MatrixTile(2, 2, 4, 2, 2, ahead=True),
    MatrixTile(2, 2, 4, 4, 1, 16, ahead=True),
    MatrixTile(2, 4, 4, 4, 1, 16, ahead=True),  # 128 x 256
    MatrixTile(4, 2, 4, 4, 1, ahead=True),  # 256 x 128
    MatrixTile(2, 2, 2, 4, 1, ahead=True),  # 64 x 128
    MatrixTile(2, 2, 4, 2, 1, ahead=True),  # 128 x 64
]
NF4_TILES = [Tile(m, n, 16, 2, 2) for m, n in ((64, 128), (128, 64), (64, 64))]
SKINNY_TILES = [TALL_SKINNY, FLAT_SKINNY, Tile(128, 16, 16, 1, 1), Tile(32, 16, 32, 1, 1), Tile(64, 16, 32, 1, 1)]
SKINNY_TILES += [Tile(16, 128, 16, 1, 1), Tile(16, 64, 32, 1, 1), Tile(128, 16, 16, 2, 1), Tile(16, 128, 16, 1, 2)]


def check(device: WgpuDevice, a: np.ndarray, b: np.ndarray, kind: str, c: np.ndarray) -> float:
    """Relative error of the first rows against float64."""
    left = a.T if kind[0] == "t" else a
    right = b.T if kind[1] == "t" else b
    rows = slice(0, 8)
    exact = left[rows].astype(np.float64) @ right.astype(np.float64)
    return float(np.linalg.norm(c[rows] - exact) / np.linalg.norm(exact))


def bench_shape(device: WgpuDevice, report: Report, kind: str, m: int, n: int, k: int, sweep: bool, dtype: str) -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((k, m) if kind[0] == "t" else (m, k)).astype(dtype)
    b = rng.standard_normal((n, k) if kind[1] == "t" else (k, n)).astype(dtype)
    da, db, out = device.upload(a), device.upload(b), device.empty((m, n), np.dtype(dtype))
    on_units = device.matrix_units and gemm_matrix.served(
        (dtype, dtype), dtype, (m, n, k), kind[0] == "t", kind[1] == "t", a.shape[1]
    )
    chosen = gemm_matrix.choose_tile(m, n, k, 1, device.workgroup_bytes) if on_units else choose_tile(m, n, k)
    variants: list[tuple[Tile | MatrixTile, int]] = [chosen]
    if sweep and on_units:
        splits = [1, 2, 4, 8] if m * n <= 2048 * 2048 else [1]
        variants += [(t, s) for t in UNITS_TILES for s in splits if (t, s) != chosen]
    elif sweep:
        tiles = SKINNY_TILES if min(m, n) <= 16 else SWEEP_TILES
        splits = [1, 2, 4, 8, 16, 32] if m * n <= 2048 * 600 else [1]
        variants += [(t, s) for t in tiles for s in splits if s * 64 <= k and (t, s) != chosen]
    for tile, split in variants:
        try:

            def work(tile: Tile | MatrixTile = tile, split: int = split) -> None:
                ways = {"trans_a": kind[0] == "t", "trans_b": kind[1] == "t"}
                matmul(device, da, db, Epilogue(out), tile=tile, splits=split, **ways)

            device.fill(out, 0.0)
            work()
            error = check(device, a, b, kind, device.download(out))
            seconds, spread = time_device(device, work)
        except DeviceError as problem:
            print("failed", tile, split, str(problem)[:200])
            continue
        report.row(
            op=f"gemm_{kind}", m=m, n=n, k=k, tile=name_of(tile), splits=split,
            chosen=(tile, split) == chosen, tflops=product_flop(m, n, k) / seconds / 1e12, us=seconds * 1e6,
            spread=spread, error=error,
        )  # fmt: skip
    if has_cuda():
        torch_peer(report, kind, m, n, k, dtype)


def torch_peer(report: Report, kind: str, m: int, n: int, k: int, dtype: str) -> None:
    import torch

    given = {"device": "cuda", "dtype": getattr(torch, dtype)}
    a = torch.randn((k, m) if kind[0] == "t" else (m, k), **given)
    b = torch.randn((n, k) if kind[1] == "t" else (k, n), **given)
    x, y = (a.T if kind[0] == "t" else a), (b.T if kind[1] == "t" else b)
    seconds, spread = time_torch(lambda: x @ y)
    report.row(
        op=f"gemm_{kind}", m=m, n=n, k=k, tile=f"torch {dtype}", tflops=product_flop(m, n, k) / seconds / 1e12,
        us=seconds * 1e6, spread=spread,
    )  # fmt: skip


def random_nf4(device: WgpuDevice, n: int, k: int) -> NF4Array:
    """A weight with double quantization."""
    rng = np.random.default_rng(0)
    blocks = n * k // 64
    return NF4Array(
        packed=device.upload(rng.integers(0, 256, n * k // 2).astype(np.uint8)),
        absmax=device.upload(rng.integers(0, 256, blocks).astype(np.uint8)),
        shape=(n, k),
        nested_absmax=device.upload(rng.random(-(-blocks // 256)).astype(np.float32)),
        nested_code=device.upload(np.linspace(-1, 1, 256).astype(np.float32)),
        nested_offset=device.upload(np.ones(1, np.float32)),
    )


def bench_nf4(device: WgpuDevice, report: Report, m: int, n: int, k: int, sweep: bool) -> None:
    """linear_nf4 and its dx, each with a LoRA term of rank 16, and checked against the dense GEMM of the decoded
    weight; and of operands rounded to 8 bits, rounding included."""
    rng = np.random.default_rng(0)
    weight = random_nf4(device, n, k)
    decoded = device.download(device.dequantize(weight)).astype(np.float64)
    for backward in (False, True):
        inner, outer = (n, k) if backward else (k, n)
        x, u = rng.standard_normal((m, inner)), rng.standard_normal((m, 16))
        v = rng.standard_normal((16, outer) if backward else (outer, 16))
        exact = x[:8] @ (decoded if backward else decoded.T) + u[:8] @ (v if backward else v.T)
        dx, du, dv = (device.upload(t.astype(np.float32)) for t in (x, u, v))
        out = device.empty((m, outer))
        end = Epilogue(out, lowrank=(du, dv))
        chosen = choose_tile(m, outer, inner)
        variants = [chosen]
        if sweep:
            splits = [1, 2, 3, 4, 6] if m * outer <= 2048 * 2048 else [1]
            variants += [(t, s) for t in NF4_TILES for s in splits if (t, s) != chosen]
        for tile, split in variants:
            options = {"trans_b": not backward, "tile": tile, "splits": split}
            work = partial(matmul, device, dx, weight, end, **options)
            time_nf4(device, report, work, out, exact, {
                "op": "linear_nf4_backward" if backward else "linear_nf4", "m": m, "n": n, "k": k,
                "tile": name_of(tile), "splits": split, "chosen": (tile, split) == chosen,
            })  # fmt: skip
        parts = gemm_int8.splits_of((m, outer, inner))
        rounded = partial(gemm_int8.launch, device, *parts, dx, weight, end, trans_b=not backward)
        name = "linear_nf4_int8" + "_backward" * backward
        time_nf4(device, report, rounded, out, exact, {"op": name, "m": m, "n": n, "k": k, "chosen": True})


def time_nf4(
    device: WgpuDevice, report: Report, work: Callable[[], None], out: Array, exact: np.ndarray, row: dict[str, Any]
) -> None:
    try:
        device.fill(out, 0.0)
        work()
        got = device.download(out)[: len(exact)]
        seconds, spread = time_device(device, work)
    except DeviceError as problem:
        print("failed", row, str(problem)[:200])
        return
    error = float(np.linalg.norm(got - exact) / np.linalg.norm(exact))
    flop = product_flop(row["m"], row["n"], row["k"])
    report.row(**row, tflops=flop / seconds / 1e12, us=seconds * 1e6, spread=spread, error=error)


def name_of(tile: Tile | MatrixTile) -> str:
    size = f"{tile.m}x{tile.n}x{tile.k}"
    if isinstance(tile, Tile):
        return f"{size}/{tile.tm4}{tile.tn4}"
    return f"{size}/{tile.sg_m}x{tile.sg_n} subgroups/{16 * tile.sub_j} columns out" + "/ahead" * tile.ahead


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=None, help="adapter index or name (default: the best)")
    parser.add_argument("--compute", default="float32", choices=("float32", "float16"))
    parser.add_argument("--sweep", action="store_true", help="all tiles, not only the one that is chosen")
    parser.add_argument("--nf4-only", action="store_true")
    parser.add_argument("--small", action="store_true", help="small sizes, to try the script on a slow device")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    if has_cuda():
        import torch

        torch.backends.cuda.matmul.allow_tf32 = False
    if args.sweep:
        common.WARM_SECONDS = 0.1  # hundreds of variants one after another keep the GPU warm
    device = bind(WgpuDevice)(args.device)
    report = Report("gemm" if args.compute == "float32" else "gemm-float16", device, args.out)
    if args.small:
        dense, nf4 = [("nn", 64, 64, 64), ("tn", 64, 16, 128)], [(64, 64, 128)]
    else:
        dense, nf4 = SQUARE + MODEL, NF4
    for kind, m, n, k in [] if args.nf4_only else dense:
        bench_shape(device, report, kind, m, n, k, args.sweep, args.compute)
    for m, n, k in nf4 if args.compute == "float32" else []:
        bench_nf4(device, report, m, n, k, args.sweep)


if __name__ == "__main__":
    main()
