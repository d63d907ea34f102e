"""flash-linear-attention's gated delta rule, timed by bench_delta_rule.py.

    python bench/peer_fla.py SHAPES SHARE OF

compiles a share of its kernels' variants, so that several processes fill Triton's cache at once. SHAPES is a JSON list.

Its backward refuses Triton 3.4 to 3.7.0 on Hopper, where one of its kernels can be wrong. The check is lifted here: the
work is the same, and rows state the error of its gradients.
"""

# mypy: disable-error-code="misc"
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Shape = tuple[int, ...]


_tuners: list[Any] = []


def choose_by_short_timings(share: int = 0, of: int = 0) -> None:
    """Let Triton time each variant of a kernel for 20 ms, or a share of them; before fla is imported."""
    import torch
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    begin = Autotuner.__init__

    def time(*args: Any, **options: Any) -> Any:
        found = do_bench(*args, warmup=5, rep=20, **options)
        torch.cuda.empty_cache()  # several processes share the memory
        return found

    def shorter(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **options: Any) -> None:
        if of:  # and the first, which fits any GPU
            configs = [configs[0], *(configs[i] for i in range(share, len(configs), of) if i)]
        begin(self, fn, arg_names, configs, *args, **options)
        self._do_bench = time
        _tuners.append(self)

    Autotuner.__init__ = shorter


def compile_kernels(shapes: Sequence[Shape]) -> None:
    """Compile the variants of all kernels for these shapes on all cores; the variants do not depend on the length."""
    count = min(os.cpu_count() or 1, 16)
    short = sorted({(batch, 256, *others) for batch, _, *others in shapes})
    command = [sys.executable, __file__, json.dumps(short)]
    parts = [subprocess.Popen([*command, str(part), str(count)]) for part in range(count)]
    for part in parts:
        part.wait()
    choose_by_short_timings()


def inputs_of(shape: Shape, host: dict[str, np.ndarray]) -> tuple[list[Any], Any]:
    """Return q, k, v, g and beta, which need gradients, and the gradient of the output, in bfloat16."""
    import torch

    batch, tokens, key_heads, heads, width = shape
    sizes = (key_heads * width, key_heads * width, heads * width)
    qkv = torch.from_numpy(host["qkv"].astype(np.float32)).cuda().bfloat16()
    q, k, v = (x.reshape(batch, tokens, -1, width).contiguous() for x in qkv.split(sizes, dim=-1))
    g, beta = (torch.from_numpy(host[name]).cuda() for name in ("g", "beta"))
    dy = torch.from_numpy(host["dy"].astype(np.float32)).cuda().bfloat16()
    return [x.requires_grad_() for x in (q, k, v, g, beta.bfloat16())], dy


def calls(shape: Shape, host: dict[str, np.ndarray], *, tune: bool = True) -> dict[str, Callable[[], Any]]:
    """The forward, and both directions. tune: choose the best variants for this length."""
    import torch
    from fla.ops.common import chunk_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    chunk_o.IS_NVIDIA_HOPPER = False  # read by the check alone from here on
    for tuner in _tuners if tune else ():
        tuner.cache.clear()
    inputs, dy = inputs_of(shape, host)

    def forward() -> Any:
        return chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)[0]

    def both() -> list[Any]:
        y = forward()
        return [y, *torch.autograd.grad(y, inputs, dy)]

    return {"forward": forward, "both": both}


def outputs(shape: Shape, host: dict[str, np.ndarray]) -> list[np.ndarray]:
    """y, dqkv, dg and dbeta in float64."""
    import torch

    y, dq, dk, dv, dg, dbeta = calls(shape, host, tune=False)["both"]()
    dqkv = torch.cat([x.reshape(*x.shape[:2], -1) for x in (dq, dk, dv)], dim=-1)
    return [x.detach().double().cpu().numpy() for x in (y, dqkv, dg, dbeta)]


def main() -> None:
    """Run each kernel with its share of the variants."""
    choose_by_short_timings(int(sys.argv[2]), int(sys.argv[3]))
    from bench_delta_rule import host_arrays

    for shape in map(tuple, json.loads(sys.argv[1])):
        calls(shape, host_arrays(shape, np.dtype(np.float16)))["both"]()


if __name__ == "__main__":
    main()
