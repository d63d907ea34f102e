"""Time of the gated delta rule (next to flash-linear-attention) or Mamba-2's recurrence, by direction and kernel.

    python bench/bench_delta_rule.py [--operator ssd] [--device NAME] [--dtype float16] [--shapes 0,1] [--small]
        [--peer] [--profile] [--out FILE]

Shapes are one layer's: batch, tokens, key heads, heads, width; of Mamba-2 groups, heads, widths of state and head. The
first tokens are checked against float64 first. With --peer, flash-linear-attention (pip install flash-linear-attention)
runs in bfloat16 with its tensor cores; share is its time over ours.
"""

# mypy: disable-error-code="misc"
from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import peer_fla
from common import Report, time_device, time_torch

from wgrad.autograd.bind import bind
from wgrad.autograd.reference import ReferenceDevice
from wgrad.wgsl.device import WgpuDevice

# Qwen3.5 0.8B and 4B: a row of 8,192 tokens, four of 2,048, 0.8B at 32k; then 2,048 tokens of both, and 4B at 32k.
SHAPES = [
    (1, 8192, 16, 16, 128),
    (4, 2048, 16, 16, 128),
    (1, 8192, 16, 32, 128),
    (1, 32_768, 16, 16, 128),
    (1, 2048, 16, 16, 128),
    (1, 2048, 16, 32, 128),
    (1, 32_768, 16, 32, 128),
]
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


def first_tokens(host: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {n: np.ascontiguousarray(a[:1, :CHECKED]) if a.ndim > 1 else a for n, a in host.items()}


def outputs(device: Any, shape: tuple[int, ...], host: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Output and gradients, in float64."""
    op, options = options_of(shape)
    given = {n: device.upload(a) for n, a in host.items()}
    dy = given.pop("dy")
    y, states = getattr(device, op)(**given, **options)
    made = (y, *getattr(device, f"{op}_backward")(dy, **given, states=states, **options))
    return [device.download(a).astype(np.float64) for a in made]


def exact_outputs(shape: tuple[int, ...], host: dict[str, np.ndarray]) -> list[np.ndarray]:
    exact = {n: a.astype(np.float64) if a.dtype.kind == "f" else a for n, a in first_tokens(host).items()}
    return outputs(ReferenceDevice(), shape, exact)


def error(found: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """The largest relative error (2-norm) of output and gradients."""
    return max(float(np.linalg.norm(f - w) / np.linalg.norm(w)) for f, w in zip(found, wanted, strict=True))


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


def time_peer(shape: tuple[int, ...], host: dict[str, np.ndarray], wanted: list[np.ndarray]) -> dict[str, float]:
    """Milliseconds by direction of flash-linear-attention, and its error."""
    found = {name: 1e3 * time_torch(call).seconds for name, call in peer_fla.calls(shape, host).items()}
    off = error(peer_fla.outputs((1, CHECKED, *shape[2:]), first_tokens(host)), wanted)
    return {"forward": found["forward"], "backward": found["both"] - found["forward"], "error": off}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operator", choices=SMALL, default="delta_rule")
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--shapes", help="numbers of shapes, e.g. 0,2")
    parser.add_argument("--small", action="store_true", help="a size that times nothing")
    parser.add_argument("--peer", action="store_true", help="time flash-linear-attention's delta rule as well")
    parser.add_argument("--profile", action="store_true", help="the time of each kernel as well")
    parser.add_argument("--out", help="JSONL file (default: bench/results/OPERATOR.jsonl)")
    args = parser.parse_args()
    device: Any = bind(WgpuDevice)(args.device)
    shapes: list[tuple[int, ...]] = list(SHAPES if args.operator == "delta_rule" else SSD_SHAPES)
    if args.small or args.shapes:
        shapes = SMALL[args.operator] if args.small else [shapes[int(i)] for i in args.shapes.split(",")]
    if args.peer:
        peer_fla.compile_kernels(shapes)
    report, dtype = Report(args.operator, device, args.out), np.dtype(args.dtype)
    for shape in shapes:
        host = host_arrays(shape, dtype)
        wanted = exact_outputs(shape, host)
        worst = error(outputs(device, shape, first_tokens(host)), wanted)
        peer = time_peer(shape, host, wanted) if args.peer else {}
        for name, call in ours(device, shape, host).items():
            row: dict[str, Any] = {"shape": "x".join(map(str, shape)), "direction": name, "dtype": args.dtype}
            time = time_device(device, call)
            row |= {"ms": 1e3 * time.seconds, "spread": time.spread, "error": worst}
            if peer:
                row |= {"fla_ms": peer[name], "fla_error": peer["error"], "share": peer[name] / row["ms"]}
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
