"""GB/s of the memory-bound operators, forward and backward, beside a plain copy in the same run.

    python bench/bench_memory_ops.py [--device NAME] [--rows 8192] [--columns 4096] [--only rms] [--out FILE]

Bytes are what the operator must move: each input read once, each output written once; scratch does not count. `share`
is of the copy's GB/s. With torch and CUDA the same operators in eager mode stand beside (bitsandbytes for NF4, if it is
installed). Results are first checked on a few rows against the NumPy reference in float64.
"""

# mypy: disable-error-code="misc,no-redef"
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from common import Report, has_cuda, time_device, time_torch

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


def normal(device: WgpuDevice, shape: tuple[int, ...], dtype: np.dtype, seed: int = 0) -> Any:
    """Random numbers without a second copy of a large array on the host: one block repeated."""
    block = np.random.default_rng(seed).standard_normal(1 << 16).astype(dtype)
    return device.upload(np.resize(block, shape))


def copies(device: WgpuDevice, n: int) -> Iterator[Work]:
    for words in (n, n // 8):
        src, out = device.zeros((words,)), device.zeros((words,))
        yield Work(f"copy {words * 4 >> 20} MiB", "float32", 8.0 * words, lambda a=src, b=out: device.copy(a, b))


def norms(device: WgpuDevice, rows: int, columns: int, torch: Any) -> Iterator[Work]:
    for dtype in (F32, F16):
        if dtype == F16 and not device.float16:
            continue
        for r, c in ((rows, columns), (rows * columns // 128, 128)):
            x, dy, extra = (normal(device, (r, c), dtype, i) for i in range(3))
            weight = device.upload(np.ones(c, np.float32))
            _, rstd = device.rms_norm(x, weight, 1e-5)
            size = r * c * dtype.itemsize
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

            def with_residual(dy: Any = dy, x: Any = x, w: Any = weight, s: Any = rstd, e: Any = extra) -> Any:
                return device.rms_norm_backward(dy, x, w, s, residual_grad=e, need_dweight=False)

            name = f"{r}x{c}"
            yield Work(
                f"rms_norm {name}", str(dtype), 2 * size, lambda x=x, w=weight: device.rms_norm(x, w, 1e-5), peer
            )
            yield Work(
                f"rms_norm_backward {name}",
                str(dtype),
                3 * size,
                lambda dy=dy, x=x, w=weight, s=rstd: device.rms_norm_backward(dy, x, w, s),
                backward,
            )
            yield Work(f"rms_norm_backward + residual, no dweight {name}", str(dtype), 4 * size, with_residual)


def activations(device: WgpuDevice, rows: int, columns: int, torch: Any) -> Iterator[Work]:
    for dtype in (F32, F16):
        if dtype == F16 and not device.float16:
            continue
        gate, up, dy = (normal(device, (rows, columns), dtype, i) for i in range(3))
        size = rows * columns * dtype.itemsize
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

        shape = f"{rows}x{columns}"
        yield Work(f"swiglu {shape}", str(dtype), 3 * size, lambda g=gate, u=up: device.swiglu(g, u), peer)
        yield Work(
            f"swiglu_backward {shape}",
            str(dtype),
            5 * size,
            lambda d=dy, g=gate, u=up: device.swiglu_backward(d, g, u),
            backward,
        )


def ropes(device: WgpuDevice, rows: int, columns: int, torch: Any) -> Iterator[Work]:
    for dtype in (F32, F16):
        if dtype == F16 and not device.float16:
            continue
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

            nbytes = 2.0 * x.nbytes + cos.nbytes + sin.nbytes
            for inverse in (False, True):

                def call(x: Any = x, c: Any = cos, s: Any = sin, p: Any = positions, inverse: bool = inverse) -> Any:
                    return device.rope(x, c, s, p, inverse=inverse)

                name = f"rope{'_backward' if inverse else ''} {rows}x{heads}x{width}"
                yield Work(name, str(dtype), nbytes, call, peer)


def optimisers(device: WgpuDevice, n: int, torch: Any) -> Iterator[Work]:
    p, g, m = (normal(device, (n,), F32, i) for i in range(3))
    v = device.zeros((n,))
    hyper = device.upload(np.array([1e-9, 0, 0, 0], np.float32))
    state = device.upload(np.array([1, 1, 1, 1, 1, 0.1, 0.05, 0], np.float32))
    rates = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01, "decay_elements": n // 2}
    peer = norm_peer = None
    if torch is not None:
        tp = torch.randn(n, device="cuda", requires_grad=True)
        tp.grad = torch.randn(n, device="cuda")
        peer = torch.optim.AdamW([tp], lr=1e-9, fused=True).step

        def norm_peer() -> Any:
            return torch.linalg.vector_norm(tp.grad)

    yield Work(f"adamw {n}", "float32", 28.0 * n, lambda: device.adamw(p, g, m, v, hyper, state, **rates), peer)
    yield Work(f"grad_norm {n}", "float32", 4.0 * n, lambda: device.grad_norm(g), norm_peer)


def quantisation(device: WgpuDevice, rows: int, columns: int, torch: Any) -> Iterator[Work]:
    w = normal(device, (rows, columns), F32)
    n = rows * columns
    host = None
    if torch is not None:
        try:
            import bitsandbytes.functional as host
        except ImportError:
            host = None
    yield Work(f"nf4_quantize {rows}x{columns}", "float32", 4.5625 * n, lambda: device.quantize(w))
    for double in (False, True):
        packed = device.quantize(w, double=double)
        for dtype in (F32, F16):
            if dtype == F16 and not device.float16:
                continue
            peer = None
            if host is not None:
                codes, stats = host.quantize_nf4(
                    torch_normal(torch, (rows, columns), dtype), compress_statistics=double
                )

                def peer(codes: Any = codes, stats: Any = stats) -> Any:
                    return host.dequantize_nf4(codes, stats)

            nbytes = n * (0.5 + (1 if double else 4) / 64 + dtype.itemsize)
            name = f"nf4_dequantize{' nested' if double else ''} {rows}x{columns}"
            yield Work(name, str(dtype), nbytes, lambda q=packed, t=dtype: device.dequantize(q, t), peer)


def small_ones(device: WgpuDevice, rows: int, columns: int) -> Iterator[Work]:
    x, y = normal(device, (rows, columns), F32, 0), normal(device, (rows, columns), F32, 1)
    seed = device.upload(np.array([1, 2], np.uint32))
    name, size = f"{rows}x{columns}", 4.0 * rows * columns
    yield Work(f"add {name}", "float32", 3 * size, lambda: device.add(x, y))
    yield Work(f"add in place {name}", "float32", 3 * size, lambda: device.add(x, y, out=x))
    yield Work(f"sum_rows {name}", "float32", size, lambda: device.sum_rows(x))
    yield Work(f"dropout {name}", "float32", 2 * size, lambda: device.dropout(x, 0.1, seed, 3))
    if device.float16:
        yield Work(f"cast to float16 {name}", "float32", 1.5 * size, lambda: device.cast(x, F16))


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
    yield from optimisers(device, rows * columns, torch)
    yield from quantisation(device, rows, columns, torch)
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
    for work in works(device, options.rows, options.columns):
        if options.only not in work.name and not (copy == 0.0 and work.name.startswith("copy")):
            continue
        seconds, spread = time_device(device, work.call)
        rate = work.nbytes / seconds / 1e9
        copy = copy or rate
        row = {"op": work.name, "dtype": work.dtype, "gb_per_s": rate, "spread": spread, "share": rate / copy}
        if work.peer is not None:
            peer, peer_spread = time_torch(work.peer)
            row |= {"torch_gb_per_s": work.nbytes / peer / 1e9, "torch_spread": peer_spread}
        report.row(**row, us=seconds * 1e6)


if __name__ == "__main__":
    main()
