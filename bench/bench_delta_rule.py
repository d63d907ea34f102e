"""Time of the gated delta rule, forward and backward, by kernel, beside flash-linear-attention in the same run; or of
Mamba-2's recurrence.

    python bench/bench_delta_rule.py [--operator ssd] [--device NAME] [--dtype float16] [--shapes 0,1] [--small]
        [--profile] [--out FILE]

Shapes are one layer's: batch, tokens, key heads, heads, width; of Mamba-2 groups, heads, widths of state and head. The
first tokens are checked against float64 first. flash-linear-attention (pip install flash-linear-attention) runs in
bfloat16 with its tensor cores.
"""

# mypy: disable-error-code="misc"
from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from common import Report, has_cuda, time_device, time_torch

from wgrad.autograd.bind import bind
from wgrad.autograd.reference import ReferenceDevice
from wgrad.wgsl.device import WgpuDevice

# Qwen3.5 0.8B and 4B: a row of 8,192 tokens, four of 2,048, and 0.8B at 32k.
SHAPES = [(1, 8192, 16, 16, 128), (4, 2048, 16, 16, 128), (1, 8192, 16, 32, 128), (1, 32_768, 16, 16, 128)]
# Granite 4 tiny and small, Falcon-H1 1.5B, Nemotron-H 8B, and Granite 4 tiny at 32k.
SSD_SHAPES = [
    (1, 8192, 1, 48, 128, 64),
    (1, 8192, 1, 128, 128, 64),
    (1, 8192, 1, 48, 256, 64),
    (1, 8192, 8, 128, 128, 64),
    (1, 32_768, 1, 48, 128, 64),
]
SMALL: dict[str, list[tuple[int, ...]]] = {"delta_rule": [(2, 150, 1, 2, 16)], "ssd": [(2, 150, 1, 2, 16, 10)]}
CHECKED = 200  # tokens


def options_of(shape: tuple[int, ...]) -> tuple[str, dict[str, int]]:
    """The operator of a shape, and its options."""
    if len(shape) == 5:
        return "delta_rule", {"key_heads": shape[2], "key_dim": shape[4]}
    return "ssd", {"groups": shape[2], "state_dim": shape[4]}


def host_arrays(shape: tuple[int, ...], dtype: Any) -> dict[str, np.ndarray]:
    batch, tokens, key_heads, heads, keys = shape[:5]
    width = shape[-1]
    rng = np.random.default_rng(0)
    channels = 2 * key_heads * keys + heads * width
    x, dt = ("qkv", "beta") if len(shape) == 5 else ("xbc", "dt")
    return {
        x: rng.standard_normal((batch, tokens, channels), np.float32).astype(dtype),
        "g": (-0.1 * rng.random((batch, tokens, heads))).astype(np.float32),
        dt: rng.random((batch, tokens, heads)).astype(np.float32),
        **({} if len(shape) == 5 else {"skip": rng.random(heads).astype(np.float32)}),
        "doc_start": np.zeros((batch, tokens), np.int32),
        "cache_len": np.zeros(1, np.int32),
        "dy": rng.standard_normal((batch, tokens, heads, width), np.float32).astype(dtype),
    }


def error(device: Any, shape: tuple[int, ...], host: dict[str, np.ndarray]) -> float:
    """Largest relative error (2-norm) of output and gradients of the first tokens, against float64."""
    op, options = options_of(shape)
    part = {n: np.ascontiguousarray(a[:1, :CHECKED]) if a.ndim > 1 else a for n, a in host.items()}
    exact = {n: a.astype(np.float64) if a.dtype.kind == "f" else a for n, a in part.items()}
    worst = 0.0
    outputs = []
    for where, arrays in ((ReferenceDevice(), exact), (device, part)):
        given = {n: where.upload(a) for n, a in arrays.items()}
        dy = given.pop("dy")
        y, states = getattr(where, op)(**given, **options)
        made = (y, *getattr(where, f"{op}_backward")(dy, **given, states=states, **options))
        outputs.append([where.download(a).astype(np.float64) for a in made])
    for wanted, found in zip(*outputs):
        worst = max(worst, float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted)))
    return worst


def ours(device: Any, shape: tuple[int, ...], host: dict[str, np.ndarray]) -> dict[str, Any]:
    """Calls by direction."""
    op, options = options_of(shape)
    forward, backward = getattr(device, op), getattr(device, f"{op}_backward")
    given = {n: device.upload(a) for n, a in host.items()}
    dy = given.pop("dy")
    _, states = forward(**given, **options)
    return {
        "forward": lambda: forward(**given, **options),
        "backward": lambda: backward(dy, **given, states=states, **options),
    }


def peer(shape: tuple[int, ...], host: dict[str, np.ndarray]) -> dict[str, Any]:
    """The same of flash-linear-attention; nothing where it is not installed, or has no such rule."""
    if len(shape) != 5:
        return {}
    try:
        import torch
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except Exception as problem:
        print(f"flash-linear-attention is left out: {type(problem).__name__}: {problem}")
        return {}
    batch, tokens, key_heads, heads, width = shape
    sizes = (key_heads * width, key_heads * width, heads * width)
    qkv = torch.from_numpy(host["qkv"].astype(np.float32)).cuda().bfloat16()
    q, k, v = (x.reshape(batch, tokens, -1, width).contiguous() for x in qkv.split(sizes, dim=-1))
    if heads != key_heads:
        q, k = (x.repeat_interleave(heads // key_heads, dim=2) for x in (q, k))
    g, beta = (torch.from_numpy(host[name]).cuda() for name in ("g", "beta"))
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta.bfloat16())]
    dy = torch.from_numpy(host["dy"].astype(np.float32)).cuda().bfloat16()

    def forward() -> Any:
        return chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)[0]

    def both() -> None:
        torch.autograd.grad(forward(), inputs, dy)

    found = {}
    for name, call in (("forward", forward), ("both", both)):
        try:
            call()
        except Exception as problem:  # as of its backward with some versions of Triton
            print(f"flash-linear-attention, {name}: {type(problem).__name__}: {str(problem)[:200]}")
        else:
            found[name] = call
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operator", choices=SMALL, default="delta_rule")
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--shapes", help="numbers of shapes, e.g. 0,2")
    parser.add_argument("--small", action="store_true", help="a size that times nothing")
    parser.add_argument("--profile", action="store_true", help="the time of each kernel as well")
    parser.add_argument("--out", help="JSONL file (default: bench/results/OPERATOR.jsonl)")
    args = parser.parse_args()
    device: Any = bind(WgpuDevice)(args.device)
    shapes: list[tuple[int, ...]] = list(SHAPES if args.operator == "delta_rule" else SSD_SHAPES)
    if args.small or args.shapes:
        shapes = SMALL[args.operator] if args.small else [shapes[int(i)] for i in args.shapes.split(",")]
    report, dtype = Report(args.operator, device, args.out), np.dtype(args.dtype)
    for shape in shapes:
        host = host_arrays(shape, dtype)
        worst = error(device, shape, host)
        peers = {name: time_torch(call).seconds for name, call in peer(shape, host).items()} if has_cuda() else {}
        for name, call in ours(device, shape, host).items():
            row: dict[str, Any] = {"shape": "x".join(map(str, shape)), "direction": name, "dtype": args.dtype}
            row |= {"ms": 1e3 * time_device(device, call).seconds, "error": worst}
            if peers and (name == "forward" or "both" in peers):
                theirs = peers["forward"] if name == "forward" else peers["both"] - peers["forward"]
                row |= {"fla_ms": 1e3 * theirs, "share": 1e3 * theirs / row["ms"]}
            report.row(**row)
        if args.profile:
            device.profile(True)
            for call in ours(device, shape, host).values():
                call()
            device.synchronize()
            print(device.profile_table())
            device.profile(False)


if __name__ == "__main__":
    main()
