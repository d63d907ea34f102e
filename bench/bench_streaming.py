"""Tokens/s with the frozen weights in main memory against those on the device, and the host link's rate.

    python bench/bench_streaming.py [--works llama-3.1-8b:3GiB,llama-3.1-70b:16GiB] [--max-length 8192] [--layers N]
        [--resident-layers 0,auto] [--out FILE]
    python bench/bench_streaming.py --dry [--works ...] [--matrix-units] [--peak-by-part]

A work is a shape and the limit that its pool is held to. A step is bench_train.py's: one row of so many tokens, NF4
with double quantization, r = 16, layers recomputed, and what a run chooses within the limit. Per work: GB/s of a
layer's copy by itself; the step with streamed weights; the same with them on the device, without a limit (--resident:
where they fit); whether the losses have the same bits with the settings that a run chooses for the limit; the copies'
share of the link's rate; and what a plan of these steps says. --dry: no GPU is needed: the memory of a large GPU's pool
within the limit; --peak-by-part: and, without the limit, the arrays at its peak.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from bench_train import GIB, chosen
from common import Report, median_spread
from count_launches import Counted, Counting, counting_device, print_parts
from streamed import streamed_weights

from wgrad.autograd.bind import bind
from wgrad.device.errors import OutOfMemory
from wgrad.train.commands.bench_model import SHAPES, Shape, build, random_step
from wgrad.train.inference.generation import generate_ids
from wgrad.train.model.streamed_weights import StreamedWeights
from wgrad.train.options.generate_config import GREEDY
from wgrad.train.options.option_text import parse_size
from wgrad.train.plan.lengths import PROMPT_TOKENS, SAMPLE_TOKENS
from wgrad.wgsl.device import WgpuDevice

SETTLE_STEPS, TIMED_STEPS, SAMPLES = 3, 2, 3
LINK_COPIES = 20


def link_gb_per_second(device: Any, weights: StreamedWeights) -> float:
    """Measure a layer's copy to the device by itself."""
    source = weights._sources[0]
    target = device.empty(source.shape, source.dtype)
    samples = []
    for _ in range(4):  # the first one warms up
        device.synchronize()
        start = time.perf_counter()
        for _ in range(LINK_COPIES):
            device.transfer(source, target)
        device.synchronize()
        samples.append((time.perf_counter() - start) / LINK_COPIES)
    return source.nbytes / median_spread(samples[1:])[0] / 1e9


def bytes_a_step(weights: StreamedWeights) -> int:
    """Return the bytes copied to the device: each layer forward, each but the last two backward, and the head."""
    sizes = [source.nbytes for source in weights._sources]
    head = list(weights._tables.values())[-1]
    return sum(sizes) + sum(sizes[:-2]) + int(head.nbytes)


def sized(name: str, layers: int) -> Shape:
    return replace(SHAPES[name], layers=layers) if layers else SHAPES[name]


class Steps:
    """A model's steps on a device: `seconds` each, and the losses.

    held: The device keeps to the limit. Settings are chosen as a run within the limit does, in either case.
    layers: So many layers instead of all. mode: What was chosen.
    """

    def __init__(
        self,
        name: str,
        seq_len: int,
        compute: str,
        device: Any,
        limit: int | None,
        streamed: bool,
        *,
        held: bool = True,
        layers: int = 0,
        mode: dict[str, Any] | None = None,
    ) -> None:
        resident = (mode or {}).get("resident_layers") or 0
        options: dict[str, Any] = {"make_weights": partial(streamed_weights, resident=resident)} if streamed else {}
        options |= {"memory_limit": limit and str(limit), "mode": mode}
        device.limit_memory(limit if held else None)
        shape = sized(name, layers)
        self.device, self._vocab, self._seq_len = device, shape.vocab, seq_len
        self.trainer, _ = build(shape, seq_len, device, compute, offload=streamed, **options)
        self._index = 0

    def run(self, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            self.trainer.step(random_step(self._index, self._seq_len, self._vocab), 1e-4)
            self._index += 1
        self.device.synchronize()
        return (time.perf_counter() - start) / count

    def measure(self) -> tuple[float, float, np.ndarray]:
        """Return the seconds of a step, their spread, and the losses."""
        self.run(SETTLE_STEPS)
        seconds, spread = median_spread([self.run(TIMED_STEPS) for _ in range(SAMPLES)])
        return seconds, spread, self.trainer.read_history()[:, 0]


def choose(name: str, limit: int, card: Any, resident: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return what a run within the limit chooses, and with a number the weights of so many layers on the device."""
    given: dict[str, Any] = {"stream_weights": "on", "resident_layers": None if resident == "auto" else int(resident)}
    return chosen(sized(name, args.layers), args.max_length, card, args.compute, 1, str(limit), **given)


def planned(name: str, limit: int, card: Any, mode: dict[str, Any], args: argparse.Namespace) -> dict[str, float]:
    """Return what a dry run of the GPU takes, by which `wgrad plan` judges."""
    plan = card.dry_run()
    Steps(name, args.max_length, args.compute, plan, limit, True, layers=args.layers, mode=mode).run(2)
    return {"planned_gib": plan.memory().peak_bytes / GIB, "planned_host_gib": plan.host_memory().peak_bytes / GIB}


def open_card(device: str | None) -> Any:
    """Open the device, with copies even where device memory is main memory, as these are measured."""
    card = bind(WgpuDevice)(device)
    card.shared_memory = False
    return card


def bench(name: str, limit: int, resident: str, args: argparse.Namespace, report: Report) -> None:
    row: dict[str, Any] = {"work": name, "layers": sized(name, args.layers).layers, "compute": args.compute}
    row |= {"seq_len": args.max_length, "limit_gib": limit / GIB}
    card = open_card(args.device)
    mode = choose(name, limit, card, resident, args)
    row |= {"resident_layers": mode.get("resident_layers") or 0, "offloaded": mode["offload_activations"]}
    row |= planned(name, limit, card, mode, args)
    steps = Steps(name, args.max_length, args.compute, card, limit, True, layers=args.layers, mode=mode)
    weights, device = steps.trainer.model.weights, steps.device
    assert isinstance(weights, StreamedWeights)
    seconds, spread, losses = steps.measure()
    memory = device.memory()
    device.limit_memory(None)
    link = link_gb_per_second(device, weights)
    copied = bytes_a_step(weights) / seconds / 1e9
    row |= {
        "link_gb_per_second": link, "streamed_tokens_per_second": args.max_length / seconds,
        "streamed_ms": 1e3 * seconds,
        "spread": spread, "weight_gb_per_second": copied, "share_of_link": copied / link,
        "peak_gib": memory.peak_bytes / GIB, "reserved_gib": memory.peak_reserved_bytes / GIB,
        "host_gib": device.host_memory().peak_bytes / GIB,
    }  # fmt: skip
    del steps, weights, device
    if name in args.resident.split(","):
        there = Steps(name, args.max_length, args.compute, open_card(args.device), None, False, layers=args.layers)
        seconds, spread, _ = there.measure()
        row |= {
            "resident_tokens_per_second": args.max_length / seconds, "resident_ms": 1e3 * seconds,
            "ratio": row["streamed_tokens_per_second"] * seconds / args.max_length,
            "resident_peak_gib": there.device.memory().peak_bytes / GIB,
        }  # fmt: skip
        del there
        card, layers = open_card(args.device), args.layers
        alike = Steps(name, args.max_length, args.compute, card, limit, False, held=False, layers=layers)
        alike.run(SETTLE_STEPS)
        row["same_bits"] = np.array_equal(losses[:SETTLE_STEPS], alike.trainer.read_history()[:, 0])
    report.row(**row)


def run_dry(name: str, seq_len: int, compute: str, device: Any, limit: int | None) -> None:
    """Evaluate and sample with streamed weights, before and after steps, the second of which is recorded."""
    device.operator = "held before a step"
    steps = Steps(name, seq_len, compute, device, limit, True)
    device.operator = Counting.operator
    for count in (0, 2, 1):
        if count:
            steps.run(count)
        steps.trainer.evaluate(random_step(0, seq_len, SHAPES[name].vocab).batches)
        with device.borrowing():
            list(generate_ids(steps.trainer.model, [0] * PROMPT_TOKENS, SAMPLE_TOKENS, GREEDY))


def dry(name: str, limit: int, args: argparse.Namespace) -> None:
    """Dry run in the pool of a large GPU."""
    for held, words in ((limit, f"held to {limit / GIB:.3g} GiB"), (None, "without a limit")):
        device, ends = counting_device(args.matrix_units), "it fits"
        try:
            run_dry(name, args.max_length, args.compute, device, held)
        except OutOfMemory as error:
            ends = str(error)
        memory = device.memory()
        print(
            f"{name}, {args.compute}, {args.max_length} tokens, {words}: {memory.peak_bytes / GIB:.3f} GiB in use, "
            f"{memory.peak_reserved_bytes / GIB:.3f} reserved, {device.host_memory().peak_bytes / GIB:.2f} in main "
            f"memory: {ends}"
        )
    if args.peak_by_part:
        print_parts(Counted(device.counts, memory.peak_bytes, device._pool.at_peak(), 0))


def works(text: str) -> Iterator[tuple[str, int]]:
    for work in text.split(","):
        name, _, limit = work.partition(":")
        nbytes = parse_size(limit)
        if name not in SHAPES or nbytes is None:
            raise SystemExit(f"--works: must be SHAPE:SIZE with a shape of {', '.join(SHAPES)}; got {work!r}")
        yield name, nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=None, help="adapter index or name (default: the best)")
    parser.add_argument("--works", default="llama-3.1-8b:3GiB,llama-3.1-70b:16GiB")
    parser.add_argument("--resident", default="llama-3.1-8b,tiny", help="shapes that are run on the device as well")
    parser.add_argument("--resident-layers", default="auto", help="as of wgrad finetune; several with commas")
    parser.add_argument("--compute", default="float16")
    parser.add_argument("--max-length", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=0, help="as many layers")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--matrix-units", action="store_true", help="with --dry: for a card on which they are enabled")
    parser.add_argument("--peak-by-part", action="store_true", help="with --dry: what is alive when most is in use")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    if args.dry:
        for name, limit in works(args.works):
            dry(name, limit, args)
        return
    report = Report("streaming", bind(WgpuDevice)(args.device), args.out)
    for (name, limit), resident in product(works(args.works), args.resident_layers.split(",")):
        bench(name, limit, resident, args, report)


if __name__ == "__main__":
    main()
