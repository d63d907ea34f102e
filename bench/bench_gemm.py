"""TFLOP/s of gemm and of the NF4 product, by tile, beside torch in float32 (cuBLAS) in the same run.

    python bench/bench_gemm.py [--device wgpu] [--sweep] [--out FILE]

Each timed result is checked against float64 first, on a few rows.
"""

from __future__ import annotations

import argparse
from typing import Any

import common
import numpy as np
from common import Report, has_cuda, time_device, time_torch

from wgrad.autograd.device import NF4Array
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.errors import DeviceError
from wgrad.wgsl.gemm import FLAT_SKINNY, LARGE, MEDIUM, SMALL, TALL_SKINNY, WIDE, Tile, choose_tile

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
    ("nt", 2048, 16, 576),
    ("nn", 2048, 16, 1536),
    ("tn", 576, 16, 2048),
    ("tn", 16, 1536, 2048),
]
SWEEP_TILES = [LARGE, WIDE, MEDIUM, Tile(128, 64, 16, 2, 2), Tile(128, 128, 8, 2, 2), Tile(128, 256, 8, 2, 2), SMALL]
SKINNY_TILES = [TALL_SKINNY, FLAT_SKINNY, Tile(128, 16, 16, 1, 1), Tile(32, 16, 32, 1, 1), Tile(64, 16, 32, 1, 1)]


def check(device: WgpuDevice, a: np.ndarray, b: np.ndarray, kind: str, c: np.ndarray) -> float:
    """Relative error of the first rows against float64."""
    left = a.T if kind[0] == "t" else a
    right = b.T if kind[1] == "t" else b
    rows = slice(0, 8)
    exact = left[rows].astype(np.float64) @ right.astype(np.float64)
    return float(np.linalg.norm(c[rows] - exact) / np.linalg.norm(exact))


def bench_shape(device: WgpuDevice, report: Report, kind: str, m: int, n: int, k: int, sweep: bool) -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((k, m) if kind[0] == "t" else (m, k)).astype(np.float32)
    b = rng.standard_normal((n, k) if kind[1] == "t" else (k, n)).astype(np.float32)
    da, db, out = device.upload(a), device.upload(b), device.empty((m, n))
    chosen = choose_tile(m, n, k, 1, device.workgroup_bytes)
    variants: list[tuple[Tile, int]] = [chosen]
    if sweep:
        tiles = SKINNY_TILES if min(m, n) <= 16 else SWEEP_TILES
        splits = [1, 2, 4, 8, 16] if m * n < 2048 * 1600 else [1]
        variants += [(t, s) for t in tiles for s in splits if s * 64 <= k and (t, s) != chosen]
    for tile, split in variants:
        try:

            def work(tile: Tile = tile, split: int = split) -> None:
                device._product(
                    da, db, out, (m, n, k), 1, kind[0] == "t", kind[1] == "t", 1.0, None, None, None, False,
                    tile=tile, splits=split,
                )  # fmt: skip

            device.fill(out, 0.0)
            work()
            error = check(device, a, b, kind, device.download(out))
            seconds, spread = time_device(device, work)
        except DeviceError as problem:
            print("failed", tile, split, str(problem)[:200])
            continue
        report.row(
            op=f"gemm_{kind}", m=m, n=n, k=k, tile=f"{tile.m}x{tile.n}x{tile.k}/{tile.tm4}{tile.tn4}", splits=split,
            chosen=(tile, split) == chosen, tflops=2 * m * n * k / seconds / 1e12, us=seconds * 1e6, spread=spread,
            error=error,
        )  # fmt: skip
    if has_cuda():
        torch_peer(report, kind, m, n, k)


def torch_peer(report: Report, kind: str, m: int, n: int, k: int) -> None:
    import torch

    a = torch.randn((k, m) if kind[0] == "t" else (m, k), device="cuda")
    b = torch.randn((n, k) if kind[1] == "t" else (k, n), device="cuda")
    x, y = (a.T if kind[0] == "t" else a), (b.T if kind[1] == "t" else b)
    seconds, spread = time_torch(lambda: x @ y)
    report.row(
        op=f"gemm_{kind}", m=m, n=n, k=k, tile="torch float32", tflops=2 * m * n * k / seconds / 1e12,
        us=seconds * 1e6, spread=spread,
    )  # fmt: skip


def bench_nf4(device: WgpuDevice, report: Report, m: int, n: int, k: int) -> None:
    """linear_nf4 and its dx, with double quantisation and a LoRA term of rank 16."""
    rng = np.random.default_rng(0)
    blocks = n * k // 64
    weight = NF4Array(
        packed=device.upload(rng.integers(0, 256, n * k // 2).astype(np.uint8)),
        absmax=device.upload(rng.integers(0, 256, blocks).astype(np.uint8)),
        shape=(n, k),
        nested_absmax=device.upload(rng.random(-(-blocks // 256)).astype(np.float32)),
        nested_code=device.upload(np.linspace(-1, 1, 256).astype(np.float32)),
        nested_offset=device.upload(np.ones(1, np.float32)),
    )

    def normal(*shape: int) -> Any:
        return device.upload(rng.standard_normal(shape).astype(np.float32))

    x, dy, u, v, w = normal(m, k), normal(m, n), normal(m, 16), normal(n, 16), normal(16, k)
    for name, work in (
        ("linear_nf4", lambda: device.linear_nf4(x, weight)),
        ("linear_nf4+lora", lambda: device.linear_nf4(x, weight, lowrank=(u, v))),
        ("linear_nf4_backward", lambda: device.linear_nf4_backward(dy, weight)),
        ("linear_nf4_backward+lora", lambda: device.linear_nf4_backward(dy, weight, lowrank=(u, w))),
    ):
        seconds, spread = time_device(device, work)
        report.row(op=name, m=m, n=n, k=k, tflops=2 * m * n * k / seconds / 1e12, us=seconds * 1e6, spread=spread)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=None, help="adapter index or name (default: the best)")
    parser.add_argument("--sweep", action="store_true", help="all tiles, not only the one that is chosen")
    parser.add_argument("--small", action="store_true", help="small sizes, to try the script on a slow device")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    if has_cuda():
        import torch

        torch.backends.cuda.matmul.allow_tf32 = False
    if args.sweep:
        common.WARM_SECONDS = 0.1  # hundreds of variants one after another keep the card warm
    device = WgpuDevice(args.device)
    report = Report("gemm", device, args.out)
    shapes = [("nn", 64, 64, 64), ("tn", 64, 16, 128)] if args.small else SQUARE + MODEL
    for kind, m, n, k in shapes:
        bench_shape(device, report, kind, m, n, k, args.sweep)
    for m, n, k in [(64, 64, 64)] if args.small else [(2048, 576, 576), (2048, 1536, 576), (2048, 14336, 4096)]:
        bench_nf4(device, report, m, n, k)


if __name__ == "__main__":
    main()
