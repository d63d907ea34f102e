"""Copies from and to main memory during a GEMM: how much of them it hides, by workgroups.

    python bench/bench_transfers.py [--device wgpu] [--sizes 8192x4096x4096,8192x16384x2048] [--out FILE]

Per direction and number of workgroups: GB/s of transfer.wgsl by itself; then a float16 GEMM nt alone, and right
after a copy of three quarters of its time, at the start of a submission: how much longer that takes, next to the time
of the same bytes by a copy command. The constants of wgsl/runtime/transfers.py were chosen by this.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from common import Report, time_device

from wgrad.autograd.bind import bind
from wgrad.device.contract import Array
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.runtime.transfers import SHADER, UNIT

GROUPS = (1, 2, 3, 4, 5, 8, 16)
SHARE = 0.75  # of the GEMM's time


def copy(device: Any, src: Array, out: Array, groups: int, nbytes: int) -> None:
    """The first bytes of one array to the other, by so many workgroups."""
    words = nbytes // 4096 * 1024
    pieces = [device.view(src, (words,)), device.view(out, (words,))]
    device.launch(SHADER.shader, pieces, [4 * words // UNIT], (groups, 1, 1))


def operands(device: Any, m: int, n: int, k: int) -> list[Array]:
    generator = np.random.default_rng(0)
    made = [(0.1 * generator.standard_normal(shape)).astype(np.float16) for shape in ((m, k), (n, k), (m, n))]
    return [device.upload(values) for values in made]


def seconds(device: Any, *works: Callable[[], Any]) -> float:
    """Measure all of them in one submission."""

    def submission() -> None:
        for work in works:
            work()
        device.flush()

    return float(time_device(device, submission)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=None, help="adapter index or name (default: the best)")
    parser.add_argument("--sizes", default="8192x4096x4096,8192x16384x2048", help="M x N x K of the products")
    parser.add_argument("--mib", type=int, default=128, help="of the arrays that are copied")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    device: Any = bind(WgpuDevice)(args.device)
    report = Report("transfers", device, args.out)
    here, there = (device.upload(np.zeros(args.mib << 18, np.uint32)) for _ in range(2))
    host = device.empty_host(here.shape, here.dtype)
    for size in args.sizes.split(","):
        a, b, out = operands(device, *map(int, size.split("x")))
        multiply = partial(device.gemm, a, b, trans_b=True, out=out)
        alone = seconds(device, multiply)
        for way, source, target in (("out", here, host), ("in", host, there)):
            command = here.nbytes / seconds(device, partial(device.transfer, source, target))
            for groups in GROUPS:
                piece = partial(copy, device, source, target, groups)
                rate = here.nbytes / seconds(device, partial(piece, here.nbytes))
                nbytes = min(here.nbytes, int(SHARE * alone * rate))
                longer = seconds(device, partial(piece, nbytes), multiply) - alone
                report.row(
                    work=size, way=way, groups=groups, gb_per_second=rate / 1e9, command_gb_per_second=command / 1e9,
                    mib=nbytes / 2**20, product_us=1e6 * alone, longer_us=1e6 * longer,
                    command_us=1e6 * nbytes / command, hidden=1 - longer * command / nbytes,
                )  # fmt: skip


if __name__ == "__main__":
    main()
