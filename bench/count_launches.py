"""Launches of a whole QLoRA step by operator and shader, and its peak memory, from a dry run: no GPU is needed.

    python bench/count_launches.py [--shapes smollm2-135m,tiny] [--compute float32] [--matrix-units] [--seq-len 2048]

The step is bench_train.py's, with the kernels that a large card takes (subgroups of 32, 48 KiB of workgroup memory).
Launches are counted, bytes are the pool's: nothing is timed.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from bench_train import GIB, SHAPES, build, random_step

from wgrad.autograd.bind import bind
from wgrad.device.memory import Array
from wgrad.wgsl.device import DryRunDevice
from wgrad.wgsl.runtime.compile import Constant

# What a dry run asks of the device that it stands for: the limits of an H100 through Vulkan.
CARD = {
    "adapter_type": "DiscreteGPU",
    "description": "a large card",
    "software": False,
    "subgroups": True,
    "shared_memory": False,
    "host_buffers": True,
    "float16": True,
    "bfloat16": False,
    "matrix_tile": "",
    "max_binding_bytes": 2_147_483_644,
    "max_buffer_bytes": 4_292_870_144,
    "workgroup_bytes": 49_152,
}


class Counting(DryRunDevice):
    """A dry run that counts its launches by (operator, shader)."""

    counts: Counter[tuple[str, str]]
    operator = "no operator"

    def launch(
        self,
        shader: str,
        arrays: Sequence[Array | None],
        params: Sequence[int | float],
        groups: tuple[int, int, int],
        constants: Mapping[str, Constant] | None = None,
        *,
        entry: str = "main",
        work: float = 0.0,
    ) -> None:
        self.counts[self.operator, shader if entry == "main" else f"{shader}:{entry}"] += 1


def counting_device(matrix_units: bool) -> Any:
    device = bind(Counting)(SimpleNamespace(**CARD, matrix_units=matrix_units, stacks_weights=matrix_units))
    device.counts = Counter()
    implementations = device.bound_operators

    def named(name: str) -> Any:
        def call(device: Any, **given: Any) -> Any:
            device.operator = name
            try:
                return implementations[name](device, **given)
            finally:
                device.operator = "no operator"

        return call

    device.bound_operators = {name: named(name) for name in implementations}
    return device


def count(name: str, seq_len: int, compute: str, matrix_units: bool) -> tuple[Counter[tuple[str, str]], int]:
    """Launches of the second step of a shape, and the most bytes in use."""
    device = counting_device(matrix_units)
    trainer, _ = build(SHAPES[name], seq_len, device, compute)
    for index in range(2):
        device.counts.clear()
        trainer.step(random_step(index, seq_len, SHAPES[name].vocab), 1e-4)
    return device.counts, device.memory().peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="smollm2-135m,llama-3.2-1b,llama-3.1-8b")
    parser.add_argument("--compute", default="float32")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--matrix-units", action="store_true", help="count for a card on which they are enabled")
    args = parser.parse_args()
    for name in args.shapes.split(","):
        counts, peak = count(name, args.seq_len, args.compute, args.matrix_units)
        print(f"{name}, {args.compute}: {sum(counts.values())} launches, peak {peak / GIB:.3f} GiB")
        for (operator, shader), number in counts.most_common():
            print(f"  {number:6} {operator:28} {shader}")


if __name__ == "__main__":
    main()
