"""Launches of a whole QLoRA step by operator and shader, and its peak memory, from a dry run: no GPU is needed.

    python bench/count_launches.py [--shapes smollm2-135m,tiny] [--batch 1,8] [--compute float32] [--matrix-units]
        [--gradient-checkpointing] [--offload-activations [N]] [--keep-attention] [--peak-by-part] [--max-length 2048]

The step is bench_train.py's, with the kernels of a large GPU (subgroups of 32, 48 KiB of workgroup memory).
Launches are counted, bytes are the pool's: nothing is timed. --peak-by-part: what was alive when most memory was in
use, by what made it (an operator, or what is there before the steps), dtype and shape.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
from bench_train import GIB, add_memory_options, build, random_step, shape_of
from peak_parts import CountingPool, Part

from wgrad.autograd.bind import bind
from wgrad.device.contract import SCRATCH_BYTES
from wgrad.device.memory import Array
from wgrad.wgsl.device import DryRunDevice
from wgrad.wgsl.runtime.compile import Constant

MIB = 1 << 20

# What a dry run asks of the device that it stands for: the limits of an H100 through Vulkan.
CARD = {
    "adapter_type": "DiscreteGPU",
    "description": "a large card",
    "software": False,
    "subgroups": True,
    "shared_memory": False,
    "host_buffers": True,
    "copies_beside": True,
    "scratch_bytes": SCRATCH_BYTES,
    "float16": True,
    "bfloat16": False,
    "matrix_tile": "",
    "lanes": 32,
    "matrix_shape": (16, 16, 16),
    "int8_products": False,
    "transposes_left": False,
    "few_registers": False,
    "subgroup_barrier": True,
    "max_binding_bytes": 2_147_483_644,
    "max_buffer_bytes": 4_292_870_144,
    "workgroup_bytes": 49_152,
}


class Counting(DryRunDevice):
    """A dry run that counts its launches by (operator, shader), and arrays by what made them.

    work: launches by (shader, FLOP, bytes of the arrays they are given).
    """

    counts: Counter[tuple[str, str]]
    work: Counter[tuple[str, float, int]]
    operator = "no operator"
    _pool: CountingPool

    def empty(self, shape: Sequence[int], dtype: Any = np.float32) -> Array:
        self._pool.label = f"{self.operator:28} {np.dtype(dtype).name:9} {' x '.join(map(str, shape))}"
        return super().empty(shape, dtype)

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
        self.work[shader, work, sum(array.nbytes for array in arrays if array is not None)] += 1


def counting_device(matrix_units: bool) -> Any:
    device = bind(Counting)(SimpleNamespace(**CARD, matrix_units=matrix_units, stacks_weights=matrix_units))
    device.counts, device.work = Counter(), Counter()
    device._pool = CountingPool(device._create_nothing, lambda block: None)
    device._pool.spare = device.dequantized.drop
    implementations = device.bound_operators

    def named(name: str) -> Any:
        def call(device: Any, **given: Any) -> Any:
            outside, device.operator = device.operator, name
            try:
                return implementations[name](device, **given)
            finally:
                device.operator = outside

        return call

    device.bound_operators = {name: named(name) for name in implementations}
    return device


@dataclass(frozen=True)
class Counted:
    """launches: of a step, by operator and shader. peak_bytes: the most in use; parts: of what. host_bytes: in main
    memory."""

    launches: Counter[tuple[str, str]]
    peak_bytes: int
    parts: list[Part]
    host_bytes: int


def count(
    name: str,
    seq_len: int,
    compute: str,
    matrix_units: bool,
    *,
    batch: int = 1,
    checkpointing: bool = False,
    offload: bool | int = False,
    keep_attention: bool = False,
) -> Counted:
    """The second step of a shape. checkpointing: although the shape goes without."""
    device, shape = counting_device(matrix_units), shape_of(name, checkpointing or bool(offload))
    device.operator = "held before a step"
    trainer, _ = build(shape, seq_len, device, compute, batch=batch, offload=offload, keep_attention=keep_attention)
    device.operator = Counting.operator
    for index in range(2):
        device.counts.clear()
        trainer.step(random_step(index, seq_len, shape.vocab, batch), 1e-4)
    pool = device._pool
    return Counted(device.counts, pool.peak_bytes, pool.at_peak(), device.host_memory().peak_bytes)


def print_parts(counted: Counted) -> None:
    """Those of at least half a percent of the peak, and the rest."""
    shown = [part for part in counted.parts if part.nbytes >= counted.peak_bytes / 200]
    for part in shown:
        print(f"  {part.nbytes / MIB:9.1f} MiB  {part.number:5} of  {part.label}")
    print(f"  {(counted.peak_bytes - sum(part.nbytes for part in shown)) / MIB:9.1f} MiB  in all else")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="smollm2-135m,llama-3.2-1b,llama-3.1-8b")
    parser.add_argument("--compute", default="float32")
    parser.add_argument("--batch", default="1", help="rows of a step, each a count of its own")
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--matrix-units", action="store_true", help="count for a card on which they are enabled")
    parser.add_argument("--peak-by-part", action="store_true", help="what is alive at the peak instead of launches")
    add_memory_options(parser)
    args = parser.parse_args()
    options: dict[str, Any] = {"checkpointing": args.gradient_checkpointing, "keep_attention": args.keep_attention}
    options |= {"offload": args.offload_activations}
    for name, batch in product(args.shapes.split(","), map(int, args.batch.split(","))):
        found = count(name, args.max_length, args.compute, args.matrix_units, batch=batch, **options)
        memory = f"peak {found.peak_bytes / GIB:.3f} GiB, in main memory {found.host_bytes / GIB:.3f}"
        print(f"{name}, {batch} x {args.max_length}, {args.compute}: {sum(found.launches.values())} launches, {memory}")
        if args.peak_by_part:
            print_parts(found)
            continue
        for (operator, shader), number in found.launches.most_common():
            print(f"  {number:6} {operator:28} {shader}")


if __name__ == "__main__":
    main()
