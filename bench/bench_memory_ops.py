"""GB/s of the memory-bound operators, forward and backward, next to a plain copy in the same run.

    python bench/bench_memory_ops.py [--device NAME] [--rows 8192] [--columns 4096] [--only rms] [--out FILE]

Bytes are what the operator must move (wgrad.autograd.bench.cost). `share` is of the copy's GB/s. With torch and CUDA
they also run in eager mode there (bitsandbytes for NF4, if it is installed). Results are first checked on a
few rows against the NumPy reference in float64.
"""

# mypy: disable-error-code="misc,no-redef"
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from common import Report, has_cuda, time_device, time_torch

from wgrad.autograd.bench.cost import cost
from wgrad.autograd.bench.entry import normal
from wgrad.autograd.bind import bind
from wgrad.autograd.reference import ReferenceDevice
from wgrad.wgsl.device import WgpuDevice

F32, F16 = np.dtype(np.float32), np.dtype(np.float16)
CHECK_ROWS = 37


@dataclass
class Work:
    """One timed call. peer: the same in torch, from the same sizes, or None."""

    name: str
    dtype: str
    nbytes: float
    call: Callable[[], Any]
    peer: Callable[[], Any] | None = None


def work(device: WgpuDevice, op: str, name: str, dtype: Any, given: dict[str, Any], peer: Any = None) -> Work:
    """A call of an operator, with the bytes that it must move."""
    call = partial(getattr(device, op), **given)
    return Work(name, str(np.dtype(dtype)), cost(op, given, call()).nbytes, call, peer)


def kinds(device: WgpuDevice) -> list[np.dtype]:
    return [F32, F16] if device.float16 else [F32]


def copies(device: WgpuDevice, n: int) -> Iterator[Work]:
    for words in (n, n // 8):
        src, out = device.zeros((words,)), device.zeros((words,))
        yield Work(f"copy {words * 4 >> 20} MiB", "float32", 8.0 * words, lambda a=src, b=out: device.copy(a, b))


def norms(device: WgpuDevice, rows: int, columns: int, torch: Any) -> Iterator[Work]:
    for dtype in kinds(device):
        for r, c in ((rows, columns), (rows * columns // 128, 128)):
            x, dy, extra = (normal(device, (r, c), dtype, i) for i in range(3))
            given = {"x": x, "weight": device.upload(np.ones(c, np.float32))}
            _, rstd = device.rms_norm(**given, eps=1e-5)
            back = {"dy": dy, **given, "rstd": rstd}
            peer = backward = None
            if torch is not None:
                tx, tdy = torch_normal(torch, (r, c), dtype).requires_grad_(), torch_normal(torch, (r, c), dtype)
                tw = torch.ones(c, device="cuda", dtype=tx.dtype, requires_grad=True)
                y = torch.nn.functional.rms_norm(tx, (c,), tw, 1e-5)

                def peer(tx: Any = tx, tw: Any = tw, c: int = c) -> None:
                    with torch.no_grad():
                        torch.nn.functional.rms_norm(tx, (c,), tw, 1e-5)

                def backward(y: Any = y, tx: Any = tx, tw: Any = tw, tdy: Any = tdy) -> None:
                    torch.autograd.grad(y, (tx, tw), tdy, retain_graph=True)

            op, name = "rms_norm_backward", f"{r}x{c}"
            yield work(device, "rms_norm", f"rms_norm {name}", dtype, {**given, "eps": 1e-5}, peer)
            yield work(device, op, f"{op} {name}", dtype, back, backward)
            with_residual = {**back, "residual_grad": extra, "need_dweight": False}
            yield work(device, op, f"{op} + residual, no dweight {name}", dtype, with_residual)


def activations(device: WgpuDevice, rows: int, columns: int, torch: Any) -> Iterator[Work]:
    for dtype in kinds(device):
        gate, up, dy = (normal(device, (rows, columns), dtype, i) for i in range(3))
        peer = backward = None
        if torch is not None:
            tg, tu = (torch_normal(torch, (rows, columns), dtype).requires_grad_() for _ in range(2))
            tdy = torch_normal(torch, (rows, columns), dtype)
            y = torch.nn.functional.silu(tg) * tu

            def peer(tg: Any = tg, tu: Any = tu) -> None:
                with torch.no_grad():
                    torch.nn.functional.silu(tg) * tu

            def backward(y: Any = y, tg: Any = tg, tu: Any = tu, tdy: Any = tdy) -> None:
                torch.autograd.grad(y, (tg, tu), tdy, retain_graph=True)

        shape, given = f"{rows}x{columns}", {"gate": gate, "up": up}
        yield work(device, "swiglu", f"swiglu {shape}", dtype, given, peer)
        yield work(device, "swiglu_backward", f"swiglu_backward {shape}", dtype, {"dy": dy, **given}, backward)


def ropes(device: WgpuDevice, rows: int, columns: int, torch: Any) -> Iterator[Work]:
    for dtype in kinds(device):
        for width in (128, 64):
            heads = columns // width
            x = normal(device, (rows, heads, width), dtype)
            cos, sin = normal(device, (rows, width // 2), F32), normal(device, (rows, width // 2), F32)
            positions = device.upload(np.arange(rows, dtype=np.int32))
            peer = None
            if torch is not None:
                tx, tc = torch_normal(torch, (rows, heads, width), dtype), torch_normal(torch, (rows, 1, width), dtype)

                def peer(tx: Any = tx, tc: Any = tc, half: int = width // 2) -> Any:
                    return tx * tc + torch.cat((-tx[..., half:], tx[..., :half]), -1) * tc

            for inverse in (False, True):
                given = {"x": x, "cos": cos, "sin": sin, "positions": positions, "inverse": inverse}
                name = f"rope{'_backward' if inverse else ''} {rows}x{heads}x{width}"
                yield work(device, "rope", name, dtype, given, peer)


def optimizers(device: WgpuDevice, n: int, torch: Any) -> Iterator[Work]:
    p, g, m = (normal(device, (n,), F32, i) for i in range(3))
    hyper = device.upload(np.array([1e-9, 0, 0, 0], np.float32))
    state = device.upload(np.array([1, 1, 1, 1, 1, 0.1, 0.05, 0], np.float32))
    rates = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01, "decay_elements": n // 2}
    given = {"p": p, "g": g, "exp_avg": m, "exp_avg_sq": device.zeros((n,)), "hyper": hyper, "state": state, **rates}
    peer = norm_peer = None
    if torch is not None:
        tp = torch.randn(n, device="cuda", requires_grad=True)
        tp.grad = torch.randn(n, device="cuda")
        peer = torch.optim.AdamW([tp], lr=1e-9, fused=True).step

        def norm_peer() -> Any:
            return torch.linalg.vector_norm(tp.grad)

    yield work(device, "adamw", f"adamw {n}", F32, given, peer)
    yield work(device, "grad_norm", f"grad_norm {n}", F32, {"g": g}, norm_peer)


def quantization(device: WgpuDevice, rows: int, columns: int, torch: Any) -> Iterator[Work]:
    w = normal(device, (rows, columns), F32)
    host = None
    if torch is not None:
        try:
            import bitsandbytes.functional as host
        except ImportError:
            host = None
    yield work(device, "quantize", f"nf4_quantize {rows}x{columns}", F32, {"w": w})
    for double in (False, True):
        packed = device.quantize(w, double=double)
        for dtype in kinds(device):
            peer = None
            if host is not None:
                codes, stats = host.quantize_nf4(
                    torch_normal(torch, (rows, columns), dtype), compress_statistics=double
                )

                def peer(codes: Any = codes, stats: Any = stats) -> Any:
                    return host.dequantize_nf4(codes, stats)

            name = f"nf4_dequantize{' nested' if double else ''} {rows}x{columns}"
            yield work(device, "dequantize", name, dtype, {"w": packed, "dtype": dtype}, peer)


def small_ones(device: WgpuDevice, rows: int, columns: int) -> Iterator[Work]:
    x, y = normal(device, (rows, columns), F32, 0), normal(device, (rows, columns), F32, 1)
    seed = device.upload(np.array([1, 2], np.uint32))
    name = f"{rows}x{columns}"
    yield work(device, "add", f"add {name}", F32, {"a": x, "b": y})
    yield work(device, "add", f"add in place {name}", F32, {"a": x, "b": y, "out": x})
    yield work(device, "sum_rows", f"sum_rows {name}", F32, {"x": x})
    yield work(device, "dropout", f"dropout {name}", F32, {"x": x, "p": 0.1, "seed": seed, "stream": 3})
    if device.float16:
        yield work(device, "cast", f"cast to float16 {name}", F32, {"x": x, "dtype": F16})


def torch_normal(torch: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    return torch.randn(shape, device="cuda", dtype=getattr(torch, str(dtype)))


def check(device: WgpuDevice, columns: int) -> None:
    """The large variants of the shaders, on a few rows against float64."""
    rng, reference = np.random.default_rng(0), ReferenceDevice()
    x, dy = (rng.standard_normal((CHECK_ROWS, columns)).astype(np.float32) for _ in range(2))
    weight = np.ones(columns, np.float32)
    wide = [a.astype(np.float64) for a in (x, dy, weight)]
    y, rstd = device.rms_norm(device.upload(x), device.upload(weight), 1e-5)
    want_y, want_rstd = reference.rms_norm(wide[0], wide[2], 1e-5)
    dx, _ = device.rms_norm_backward(device.upload(dy), device.upload(x), device.upload(weight), rstd)
    want_dx, _ = reference.rms_norm_backward(wide[1], wide[0], wide[2], want_rstd)
    gated = device.swiglu(device.upload(x), device.upload(dy))
    for name, found, want in (
        ("rms_norm", y, want_y),
        ("rms_norm_backward", dx, want_dx),
        ("swiglu", gated, reference.swiglu(wide[0], wide[1])),
    ):
        error = np.max(np.abs(device.download(found) - want)) / np.max(np.abs(want))
        if not error < 1e-5:
            raise SystemExit(f"{name} is wrong on this device: relative error {error:.2g}; nothing was timed")


def works(device: WgpuDevice, rows: int, columns: int) -> Iterator[Work]:
    torch = None
    if has_cuda():
        import torch
    yield from copies(device, rows * columns)
    yield from norms(device, rows, columns, torch)
    yield from activations(device, rows, columns, torch)
    yield from ropes(device, rows, columns, torch)
    yield from optimizers(device, rows * columns, torch)
    yield from quantization(device, rows, columns, torch)
    yield from small_ones(device, rows, columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="index or part of the adapter's name (default: the best)")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--columns", type=int, default=4096, help="a multiple of 128")
    parser.add_argument("--only", default="", help="only what has this in its name")
    parser.add_argument("--out", help="file for the rows (default: bench/results/memory_ops.jsonl)")
    options = parser.parse_args()
    device = bind(WgpuDevice)(options.device)
    check(device, options.columns)
    report = Report("memory_ops", device, options.out)
    copy = 0.0
    for timed in works(device, options.rows, options.columns):
        if options.only not in timed.name and not (copy == 0.0 and timed.name.startswith("copy")):
            continue
        seconds, spread = time_device(device, timed.call)
        rate = timed.nbytes / seconds / 1e9
        copy = copy or rate
        row = {"op": timed.name, "dtype": timed.dtype, "gb_per_s": rate, "spread": spread, "share": rate / copy}
        if timed.peer is not None:
            peer, peer_spread = time_torch(timed.peer)
            row |= {"torch_gb_per_s": timed.nbytes / peer / 1e9, "torch_spread": peer_spread}
        report.row(**row, us=seconds * 1e6)


if __name__ == "__main__":
    main()
