"""LoRA's GEMMs on tensor cores as they occur in one step of a model: microseconds each, milliseconds a step.

    python bench/bench_lora.py [--shapes llama-3.2-1b,...] [--batch 1,4] [--max-length 2048]

The GEMMs are those of a dry run (bench_train.py's step; 1B and 8B recompute their layers). Each is launched many
times in one pass between two timestamps, on operands that together are larger than any cache; the median of five
passes, taken in turns. Next to it the time to read the large operand at --bandwidth.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
from count_launches import count

from wgrad.autograd.bind import bind
from wgrad.device.memory import Array
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.gemm import gemm_matrix_lora, gemm_matrix_skinny
from wgrad.wgsl.gemm.gemm_skinny import Skinny
from wgrad.wgsl.runtime import native

POOL_BYTES = 256 << 20
CALLS, PASSES, WARM_SECONDS = 36, 5, 0.3
LARGE = 1_000_000_000  # bytes read in a pass, about: fewer calls of large GEMMs
BOTH = -1  # in place of the first rank: du and db from one reading of X (gemm_matrix_lora.wgsl), with u as the result
Key = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int, bool, bool, bool, tuple[int, ...], int, int, bool]


@contextmanager
def noted(found: Counter[Key]) -> Iterator[None]:
    """Counts the GEMMs that are launched meanwhile, by all that tells them apart."""
    launch, launch_both = gemm_matrix_skinny.launch, gemm_matrix_lora.launch

    def counted(
        device: Any, p: Skinny, tile: Any, x: Array, s: Array, out: Array, alpha: float, accumulate: bool
    ) -> None:
        flags = p.rank_inner, p.along_rows, p.transposed
        key = x.shape, s.shape, out.shape, p.rank, *flags, p.parts, p.part_rank, p.first_rank, accumulate
        found[key] += 1
        launch(device, p, tile, x, s, out, alpha, accumulate)

    def counted_both(
        device: Any, x: Array, b: Array, u: Array, parts: tuple[int, ...], alpha: float, du: Array, db: Array, add: bool
    ) -> None:
        found[x.shape, b.shape, u.shape, b.shape[1], False, False, False, parts, 0, BOTH, add] += 1
        launch_both(device, x, b, u, parts, alpha, du, db, add)

    gemm_matrix_skinny.launch = counted  # type: ignore[assignment]
    gemm_matrix_lora.launch = counted_both  # type: ignore[assignment]
    try:
        yield
    finally:
        gemm_matrix_skinny.launch, gemm_matrix_lora.launch = launch, launch_both


class Pass:
    """Times all launches of a recording in one pass, as the device sees it."""

    def __init__(self, device: Any) -> None:
        self._device = device._device
        self._queries = self._device.create_query_set(type="timestamp", count=2)
        self._resolved = self._device.create_buffer(size=16, usage="QUERY_RESOLVE|COPY_SRC")

    def seconds(self, replay: Any) -> float:
        writes = {"query_set": self._queries, "beginning_of_pass_write_index": 0, "end_of_pass_write_index": 1}
        encoder = self._device.create_command_encoder()
        timed = encoder.begin_compute_pass(timestamp_writes=writes)
        for submission in replay.submissions:
            for dispatch in submission.dispatches:
                native.record(timed, *dispatch)
        timed.end()
        encoder.resolve_query_set(self._queries, 0, 2, self._resolved, 0)
        self._device.queue.submit([encoder.finish()])
        begin, end = np.frombuffer(self._device.queue.read_buffer(self._resolved), np.uint64)[:2].tolist()
        return (end - begin) * 1e-9


def recorded(device: Any, pool: Array, key: Key) -> tuple[Any, int]:
    """Return the recording of a GEMM, and the number of its calls in it."""
    x, s, c, rank, rank_inner, along_rows, transposed, parts, part_rank, first_rank, accumulate = key
    size = int(np.prod(x))
    copies = max(1, min(CALLS, pool.size // size))
    calls = max(copies, min(CALLS, LARGE // (2 * size)) // copies * copies)
    right, out, added = (device.zeros(shape, np.float32) for shape in (s, c, s))

    def call(i: int) -> None:
        left = device.view(pool, x, i % copies * size)
        if first_rank == BOTH:
            gemm_matrix_lora.launch(device, left, right, out, parts, 1.0, device.empty(c), added, accumulate)
            return
        p = Skinny(x, "float16", s[1], rank, rank_inner, along_rows, transposed, parts, part_rank, first_rank)
        tile = gemm_matrix_skinny.choose_tile(p, device.workgroup_bytes)
        assert tile is not None
        gemm_matrix_skinny.launch(device, p, tile, left, right, out, 1.0, accumulate)

    call(0)
    with device.capture() as replay:
        for i in range(calls):
            call(i)
    return replay, calls


def warm(device: Any, work: Callable[[], Any]) -> None:
    """Keep the GPU busy until it has reached its clock."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < WARM_SECONDS:
        work()
        device.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="smollm2-135m,llama-3.2-1b,llama-3.1-8b")
    parser.add_argument("--batch", default="1", help="rows of a step, each a step of its own")
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--bandwidth", type=float, default=4300.0, help="of the device's memory, GB/s")
    args = parser.parse_args()
    steps: dict[str, Counter[Key]] = {}
    for name, batch in product(args.shapes.split(","), map(int, args.batch.split(","))):
        found = steps.setdefault(f"{name}, {batch} x {args.max_length}", Counter())
        with noted(found):
            count(name, args.max_length, "float16", True, batch=batch, checkpointing=name != "smollm2-135m")
    device: Any = bind(WgpuDevice)()
    pool, timer = device.zeros((POOL_BYTES // 2,), np.float16), Pass(device)
    recordings = {
        key: recorded(device, pool, key) for key in dict.fromkeys(k for found in steps.values() for k in found)
    }
    warm(device, next(iter(recordings.values()))[0].run)
    samples: dict[Key, list[float]] = {key: [] for key in recordings}
    for _ in range(PASSES):
        for key, (replay, calls) in recordings.items():
            samples[key].append(timer.seconds(replay) / calls)
    print(device.description)
    for name, found in steps.items():
        total = least = 0.0
        print(f"{name}: launches of a step, X, rank, along rows or columns; us, of memory")
        for key, twice in sorted(found.items()):
            seconds, read = statistics.median(samples[key]), 2 * np.prod(key[0]) / args.bandwidth / 1e9
            total, least = total + seconds * twice / 2, least + read * twice / 2  # a dry run has two steps
            way = "both" if key[9] == BOTH else "rows" if key[5] else "columns"
            shape = f"{twice // 2:5} {'x'.join(map(str, key[0])):>12} {key[3]:3} {way:7} {str(key[7] or ''):20}"
            print(f"{shape} {seconds * 1e6:8.1f} {read * 1e6:6.1f}")
        print(f"  together {total * 1e3:.2f} ms a step; to read X {least * 1e3:.2f}")


if __name__ == "__main__":
    main()
