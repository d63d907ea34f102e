"""Time of Mamba-1's recurrence, by direction and kernel.

    python bench/bench_selective_scan.py [--device NAME] [--dtype float16] [--shapes 0,1] [--small] [--profile]
        [--out FILE]

Shapes are one layer's: batch, tokens, channels, states of a channel. The first tokens are compared with float64.
"""

# mypy: disable-error-code="misc"
from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from bench_delta_rule import error, first_tokens
from common import Report, time_device

from wgrad.autograd.bind import bind
from wgrad.autograd.reference import ReferenceDevice
from wgrad.wgsl.device import WgpuDevice

# Jamba 3B: 2,048 tokens, four rows of them, and 32k; then Mamba 2.8B, FalconMamba 7B, and a short row of Jamba 3B.
SHAPES = [
    (1, 2048, 5120, 16),
    (4, 2048, 5120, 16),
    (1, 32_768, 5120, 16),
    (1, 8192, 8192, 16),
    (1, 512, 5120, 16),
]
SMALL = [(2, 150, 40, 16)]


def host_arrays(shape: tuple[int, ...], dtype: Any) -> dict[str, np.ndarray]:
    """Inputs. Time steps and decays are those of new models: from 0.001 to 0.1, times 1 to the number of states."""
    batch, tokens, channels, states = shape
    rng = np.random.default_rng(0)
    x, dt, bc, dy = (
        rng.standard_normal((batch, tokens, width), np.float32).astype(dtype)
        for width in (channels, channels, 2 * states, channels)
    )
    weight = np.ones((channels, states + 2), np.float32)
    weight[:, :states] = np.log(np.arange(1, states + 1))
    weight[:, -1] = np.log(np.expm1(np.exp(rng.uniform(np.log(1e-3), np.log(0.1), channels))))
    starts, first = np.zeros((batch, tokens), np.int32), np.zeros(1, np.int32)
    return {"x": x, "dt": dt, "bc": bc, "weight": weight, "doc_start": starts, "cache_len": first, "dy": dy}


def outputs(device: Any, host: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Output and gradients, in float64."""
    given = {name: device.upload(array) for name, array in host.items()}
    dy = given.pop("dy")
    y, states = device.selective_scan(**given)
    made = (y, *device.selective_scan_backward(dy, **given, states=states))
    return [device.download(array).astype(np.float64) for array in made]


def of_first_tokens(host: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return first_tokens(host) | {"weight": host["weight"]}


def exact_outputs(host: dict[str, np.ndarray]) -> list[np.ndarray]:
    exact = {name: a.astype(np.float64) if a.dtype.kind == "f" else a for name, a in of_first_tokens(host).items()}
    return outputs(ReferenceDevice(), exact)


def ours(device: Any, host: dict[str, np.ndarray]) -> dict[str, Any]:
    """Calls by direction. A LoRA trains no weights of the recurrence."""
    given = {name: device.upload(array) for name, array in host.items()}
    dy = given.pop("dy")
    _, states = device.selective_scan(**given)
    back = {"states": states, "need_dweight": False}
    return {
        "forward": lambda: device.selective_scan(**given),
        "backward": lambda: device.selective_scan_backward(dy, **given, **back),
        "backward with weights": lambda: device.selective_scan_backward(dy, **given, states=states),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--shapes", help="numbers of shapes, e.g. 0,2")
    parser.add_argument("--small", action="store_true", help="a size that times nothing")
    parser.add_argument("--profile", action="store_true", help="the time of each kernel as well")
    parser.add_argument("--out", help="JSONL file (default: bench/results/selective_scan.jsonl)")
    args = parser.parse_args()
    device: Any = bind(WgpuDevice)(args.device)
    chosen = [SHAPES[int(i)] for i in args.shapes.split(",")] if args.shapes else SHAPES
    report, dtype = Report("selective_scan", device, args.out), np.dtype(args.dtype)
    for shape in SMALL if args.small else chosen:
        host = host_arrays(shape, dtype)
        worst = error(outputs(device, of_first_tokens(host)), exact_outputs(host))
        for name, call in ours(device, host).items():
            time = time_device(device, call)
            row = {"shape": "x".join(map(str, shape)), "direction": name, "dtype": args.dtype}
            report.row(**row, ms=1e3 * time.seconds, spread=time.spread, error=worst)
        if args.profile:
            device.profile(True)
            for call in ours(device, host).values():
                call()
            device.synchronize()
            print(device.profile_table())
            device.profile(False)


if __name__ == "__main__":
    main()
