"""TFLOP/s of attention, forward and backward, by tile, next to torch's SDPA in the same run.

    python bench/bench_attention.py [--device NAME] [--sweep] [--shapes 0,1] [--dtype float16] [--out FILE]

FLOP are causal: forward 2 B H T^2 D, backward 2.5 times that (five matmuls), whatever a kernel recomputes; rows of
single kernels count the matmuls that they do (dq 3, dkv 4). Each timed result is checked against float64 first.
"""

# mypy: disable-error-code="arg-type"
from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from common import Report, has_cuda, time_device, time_torch

from wgrad.autograd.bench.cost import attention_flop
from wgrad.autograd.bind import bind
from wgrad.autograd.reference import ReferenceDevice
from wgrad.wgsl.attention import attention, attention_backward, attention_matrix
from wgrad.wgsl.attention.attention_matrix import MatrixRows
from wgrad.wgsl.attention.attention_matrix_keys import MatrixKeys
from wgrad.wgsl.attention.attention_plan import Plan, Tile, plan
from wgrad.wgsl.device import WgpuDevice

# B, T, H, G, D: SmolLM2-135M, Llama-3.1-8B, Llama-3.2-1B at batch 4, a long row
SHAPES = [(1, 2048, 9, 3, 64), (1, 2048, 32, 8, 128), (4, 2048, 32, 8, 64), (1, 8192, 32, 8, 128)]
QUICK = [(1, 200, 3, 1, 64)]

FORWARD_TILES = [
    Tile(64, 64, 16, 8, 16, 16, resident=True),
    Tile(64, 64, 16, 8, 16, 16),
    Tile(64, 64, 16, 8, 32, 16),
    Tile(64, 64, 8, 16, 16, 16, resident=True),
    Tile(64, 64, 16, 16, 16, 16, resident=True),
    Tile(64, 64, 16, 16, 16, 16),
    Tile(64, 32, 8, 8, 16, 16, resident=True),
    Tile(64, 32, 8, 8, 32, 16),
    Tile(64, 32, 8, 16, 16, 16, resident=True),
    Tile(64, 32, 8, 16, 32, 32, resident=True),
    Tile(64, 32, 8, 8, 32, 16, resident=True),
    Tile(32, 64, 16, 8, 16, 16, resident=True),
    Tile(32, 64, 16, 4, 16, 16, resident=True),
    Tile(32, 64, 16, 4, 32, 16),
    Tile(32, 64, 8, 8, 16, 16, resident=True),
    Tile(32, 128, 16, 8, 16, 16, resident=True),
    Tile(128, 32, 8, 16, 16, 16),
    Tile(32, 32, 8, 8, 32, 16, resident=True),
]
BACKWARD_TILES = [
    Tile(64, 64, 16, 8, 16, 16),
    Tile(64, 64, 16, 8, 8, 16),
    Tile(64, 64, 8, 16, 16, 16),
    Tile(64, 64, 16, 16, 16, 16),
    Tile(64, 64, 16, 16, 16, 8),
    Tile(64, 32, 8, 8, 16, 16),
    Tile(64, 32, 8, 8, 32, 16),
    Tile(64, 32, 8, 16, 16, 16),
    Tile(64, 32, 8, 16, 32, 16),
    Tile(32, 64, 16, 8, 16, 16),
    Tile(32, 64, 16, 4, 16, 16),
    Tile(32, 64, 8, 8, 16, 16),
    Tile(32, 64, 16, 8, 32, 16),
    Tile(32, 128, 16, 8, 16, 16),
    Tile(32, 32, 8, 8, 16, 16),
    Tile(128, 32, 8, 16, 16, 16),
]
WANTED_GROUPS = (1, 256, 512, 1024)
_SIZES = [(n, columns, pairs) for columns in (16, 32, 64) for n in (2, 4, 6, 8) for pairs in (False, True)]
UNITS_TILES: list[MatrixRows | MatrixKeys] = [MatrixRows(n, columns, pairs=pairs) for n, columns, pairs in _SIZES]
UNITS_TILES += [MatrixKeys(n, columns, pairs=pairs) for n, columns, pairs in _SIZES]


@dataclass
class Problem:
    """Inputs on the host and the device, the float64 answers, and how much arithmetic the causal problem is."""

    shape: tuple[int, int, int, int, int]
    host: dict[str, np.ndarray]
    arrays: dict[str, Any]
    answers: dict[str, np.ndarray]

    @property
    def forward_flops(self) -> float:
        b, t, h, _, d = self.shape
        return attention_flop((b, t, h, d), t)

    @property
    def scale(self) -> float:
        return self.shape[4] ** -0.5

    def error(self, found: dict[str, Any], device: WgpuDevice) -> float:
        """Largest relative error (2-norm) of the outputs against float64."""
        worst = 0.0
        for name, array in found.items():
            exact = self.answers[name]
            got = device.download(array).astype(np.float64)
            difference = np.linalg.norm(got - exact) / np.linalg.norm(exact)
            worst = max(worst, float(difference) if np.isfinite(difference) else float("inf"))
        return worst


def make_problem(device: WgpuDevice, shape: tuple[int, int, int, int, int], dtype: Any) -> Problem:
    b, t, h, g, d = shape
    rng = np.random.default_rng(0)
    host = {n: rng.standard_normal((b, t, x, d)).astype(dtype) for n, x in (("q", h), ("k", g), ("v", g), ("do", h))}
    host |= {"doc_start": np.zeros((b, t), np.int32), "cache_len": np.zeros(1, np.int32)}
    answers = torch_answers(host, d**-0.5) if has_cuda() else reference_answers(host, d**-0.5)
    arrays = {name: device.upload(a) for name, a in host.items()}
    arrays |= {"o": device.upload(answers["o"].astype(dtype)), "lse": device.upload(answers["lse"].astype(np.float32))}
    return Problem(shape, host, arrays, answers)


def reference_answers(host: dict[str, np.ndarray], scale: float) -> dict[str, np.ndarray]:
    device = ReferenceDevice()
    x = {n: a.astype(np.float64) if a.dtype.kind == "f" else a for n, a in host.items()}
    o, lse = device.attention(x["q"], x["k"], x["v"], x["doc_start"], x["cache_len"], scale=scale)
    grads = device.attention_backward(x["do"], x["q"], x["k"], x["v"], o, lse, x["doc_start"], scale=scale)
    return {"o": o, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads))}


def torch_answers(host: dict[str, np.ndarray], scale: float) -> dict[str, np.ndarray]:
    """The same in float64 on the GPU, one key/value head at a time."""
    import torch

    x = {n: torch.from_numpy(host[n]).cuda().double().transpose(1, 2) for n in ("q", "k", "v", "do")}
    group, t = x["q"].shape[1] // x["k"].shape[1], x["q"].shape[2]
    hidden = torch.ones(t, t, dtype=torch.bool, device="cuda").triu(1)
    out = {n: torch.empty_like(x[m]) for n, m in (("o", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v"))}
    out["lse"] = torch.empty(x["q"].shape[:3], dtype=torch.float64, device="cuda")
    out["dk"].zero_()
    out["dv"].zero_()
    for b in range(x["q"].shape[0]):
        for h in range(x["q"].shape[1]):
            q, k, v, do = x["q"][b, h], x["k"][b, h // group], x["v"][b, h // group], x["do"][b, h]
            s = (q @ k.T * scale).masked_fill_(hidden, float("-inf"))
            out["lse"][b, h] = s.logsumexp(1)
            p = s.sub_(out["lse"][b, h][:, None]).exp_()
            out["o"][b, h] = p @ v
            out["dv"][b, h // group] += p.T @ do
            ds = p * (do @ v.T - (do * out["o"][b, h]).sum(1, keepdim=True)) * scale
            out["dq"][b, h] = ds @ k
            out["dk"][b, h // group] += ds.T @ q
    return {n: (a if n == "lse" else a.transpose(1, 2)).cpu().numpy() for n, a in out.items()}


def kernels(device: WgpuDevice, problem: Problem) -> dict[str, tuple[float, Callable[[], dict[str, Any]]]]:
    """Return, per kernel, its matmuls (in halves of a forward) and a call that returns its outputs by name."""
    a, scale = problem.arrays, problem.scale
    # Zeros: memory may still hold the right answer, of the variant before.
    o, lse = device.zeros(a["q"].shape, a["q"].dtype), device.zeros(a["lse"].shape, np.float32)
    dq, dk, dv = (device.zeros(a[n].shape, a[n].dtype) for n in ("q", "k", "v"))
    stats = attention_backward._delta(device, a["do"], a["o"], a["lse"])
    reads = [a["do"], a["q"], a["k"], a["v"], stats, a["doc_start"]]

    def forward() -> dict[str, Any]:
        attention._attention(device, [a["q"], a["k"], a["v"], a["doc_start"], o, lse], a["cache_len"], scale, 0, 0.0)
        return {"o": o, "lse": lse}

    def backward_dq() -> dict[str, Any]:
        attention_backward._backward_dq(device, reads, dq, scale, 0, 0.0)
        return {"dq": dq}

    def backward_dkv() -> dict[str, Any]:
        attention_backward._backward_dkv(device, reads, dk, dv, scale, 0, 0.0)
        return {"dk": dk, "dv": dv}

    def delta() -> dict[str, Any]:
        attention_backward._delta(device, a["do"], a["o"], a["lse"])
        return {}

    def backward() -> dict[str, Any]:
        names = ("do", "q", "k", "v", "o", "lse", "doc_start")
        grads = device.attention_backward(*(a[n] for n in names), scale=scale)
        return dict(zip(("dq", "dk", "dv"), grads))

    return {
        "forward": (2, forward),
        "dq": (3, backward_dq),
        "dkv": (4, backward_dkv),
        "delta": (0, delta),
        "backward": (5, backward),
    }


def tile_name(tile: Tile) -> str:
    return f"{tile.rows}x{tile.columns}/{tile.tx}x{tile.ty}/d{tile.depth}f{tile.flat}" + "r" * tile.resident


def bench_one(
    device: WgpuDevice, report: Report, problem: Problem, kernel: str, chosen: Plan, units_tile: str = ""
) -> float:
    """One row; returns seconds (infinite where the variant fails). units_tile: what to call that on tensor cores."""
    device.attention_plan = chosen
    tile = getattr(chosen, "forward" if kernel in ("forward", "backward", "delta") else kernel)
    if device.matrix_units and problem.arrays["q"].dtype == np.float16:
        name = units_tile or "matrix units"
    else:
        name = "plan" if kernel in ("backward", "delta") else tile_name(tile)
    label = dict(
        op=f"attention {kernel}",
        shape="x".join(map(str, problem.shape)),
        dtype=problem.arrays["q"].dtype.name,
        tile=name,
        groups=chosen.wanted_groups,
    )
    products, work = kernels(device, problem)[kernel]
    try:
        start = time.perf_counter()
        error = problem.error(work(), device)
        first = time.perf_counter() - start
        seconds, spread = time_device(device, work)
    except Exception as failure:
        print("failed", label, f"{type(failure).__name__}: {failure}"[:300], flush=True)
        return float("inf")
    flops = products / 2 * problem.forward_flops
    report.row(**label, tflops=flops / seconds / 1e12, us=seconds * 1e6, spread=spread, error=error, first_s=first)
    return seconds if error < 1e-2 else float("inf")


def sweep(device: WgpuDevice, report: Report, problem: Problem) -> Plan:
    """Every tile that fits, kernel by kernel, then how far to split; returns the best plan."""
    width = problem.shape[4]
    best = plan(width, device.workgroup_bytes, device.adapter_type)
    assert best is not None
    for kernel, tiles in (("forward", FORWARD_TILES), ("dq", BACKWARD_TILES), ("dkv", BACKWARD_TILES)):
        times: dict[Tile, float] = {}

        def measure(tile: Tile, kernel: str = kernel, times: dict[Tile, float] = times, best: Plan = best) -> None:
            used = tile.forward_bytes(width) if kernel == "forward" else tile.backward_bytes(width)
            if tile not in times and used <= device.workgroup_bytes:
                times[tile] = bench_one(device, report, problem, kernel, dataclasses.replace(best, **{kernel: tile}))

        for tile in (getattr(best, kernel), *tiles):
            measure(tile)
        fastest = min(times, key=lambda t: times[t])
        best = dataclasses.replace(best, **{kernel: fastest})
        print(f"best {kernel}: {fastest}", flush=True)
    for wanted in WANTED_GROUPS:
        for kernel in ("forward", "dq", "dkv"):
            bench_one(device, report, problem, kernel, dataclasses.replace(best, wanted_groups=wanted))
    return best


def sweep_units(device: WgpuDevice, report: Report, problem: Problem, chosen: Plan) -> None:
    """Every tile of tensor cores that fits, kernel by kernel."""
    width, tiles = problem.shape[4], dict(attention_matrix.TILES)
    for kernel in tiles:
        for tile in UNITS_TILES:
            if isinstance(tile, MatrixKeys) != (kernel == "dkv"):
                continue
            fits = tile.workgroup_bytes(kernel, width) <= device.workgroup_bytes and tile.columns <= width
            two = kernel != "dkv" and tile.pairs  # these want two matrices side by side
            if not fits or (two and tile.columns < 32):
                continue
            attention_matrix.TILES[kernel] = ((0, tile),)
            attention_matrix._FEW_ROWS = tile.rows
            shape = f"{tile.subgroups} subgroups{' in pairs' * tile.pairs}, {tile.columns} columns"
            name = f"{shape}, {tile.workgroup_bytes(kernel, width)} bytes"
            bench_one(device, report, problem, kernel, chosen, name)
        attention_matrix.TILES[kernel] = tiles[kernel]


def bench_decode(device: WgpuDevice, report: Report, dtype: Any) -> None:
    """One token on a long cache: the share of the GPU's bandwidth that reading k and v reaches."""
    device.attention_plan = None
    for b, s, h, g, d in ((1, 2048, 32, 8, 128), (1, 8192, 32, 8, 128), (8, 2048, 9, 3, 64)):
        q = device.zeros((b, 1, h, d), dtype)
        k, v = device.zeros((b, s, g, d), dtype), device.zeros((b, s, g, d), dtype)
        doc_start, cache_len = device.zeros((b, 1), np.int32), device.upload(np.array([s - 1], np.int32))

        def work(q: Any = q, k: Any = k, v: Any = v, doc_start: Any = doc_start, cache_len: Any = cache_len) -> Any:
            return device.attention(q, k, v, doc_start, cache_len, scale=0.1)

        seconds, spread = time_device(device, work)
        report.row(
            op="attention decode", shape=f"{b}x1,{s}x{h}x{g}x{d}", dtype=np.dtype(dtype).name, us=seconds * 1e6,
            gb_per_s=(k.nbytes + v.nbytes) / seconds / 1e9, spread=spread,
        )  # fmt: skip


def torch_peers(report: Report, problem: Problem) -> None:
    """SDPA, causal, grouped heads: forward, and forward + backward."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, do = (
            torch.from_numpy(problem.host[n]).cuda().to(dtype).transpose(1, 2).contiguous().requires_grad_(n != "do")
            for n in ("q", "k", "v", "do")
        )

        def forward(q: Any = q, k: Any = k, v: Any = v) -> Any:
            with torch.no_grad():
                return sdpa(q, k, v, is_causal=True, enable_gqa=True)

        def both(q: Any = q, k: Any = k, v: Any = v, do: Any = do) -> Any:
            return torch.autograd.grad(sdpa(q, k, v, is_causal=True, enable_gqa=True), (q, k, v), do)

        label = {"shape": "x".join(map(str, problem.shape)), "dtype": str(dtype).removeprefix("torch.")}
        seconds, spread = time_torch(forward)
        flops = problem.forward_flops
        report.row(op="torch sdpa forward", **label, tflops=flops / seconds / 1e12, us=seconds * 1e6, spread=spread)
        seconds, spread = time_torch(both)
        report.row(op="torch sdpa both", **label, tflops=3.5 * flops / seconds / 1e12, us=seconds * 1e6, spread=spread)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None, help="index or part of the name of a wgpu adapter")
    parser.add_argument("--sweep", action="store_true", help="time every tile, not only the table's choice")
    parser.add_argument("--quick", action="store_true", help="a small shape, for software drivers")
    parser.add_argument("--shapes", default="0,1", help=f"which of {SHAPES}, by index")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16"))
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    device = bind(WgpuDevice)(args.device)
    report = Report("bench_attention", device, args.out)
    for shape in QUICK if args.quick else [SHAPES[int(i)] for i in args.shapes.split(",")]:
        problem = make_problem(device, shape, np.dtype(args.dtype))
        chosen = plan(shape[4], device.workgroup_bytes, device.adapter_type)
        if chosen is None:
            raise SystemExit(f"heads of {shape[4]} elements do not fit this device")
        if args.sweep and device.matrix_units and args.dtype == "float16":
            sweep_units(device, report, problem, chosen)
        elif args.sweep:
            chosen = sweep(device, report, problem)
        for kernel in ("forward", "dq", "dkv", "delta", "backward"):
            bench_one(device, report, problem, kernel, chosen)
        if has_cuda():
            torch_peers(report, problem)
    if not args.quick:
        bench_decode(device, report, np.dtype(args.dtype))


if __name__ == "__main__":
    main()
