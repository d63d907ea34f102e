"""Tokens/s with the frozen weights in main memory against those on the device, and the host link beside them.

    python bench/bench_streaming.py [--works llama-3.1-8b:3GiB,llama-3.1-70b:16GiB] [--max-length 8192] [--layers N]
        [--out FILE]
    python bench/bench_streaming.py --dry [--works ...] [--matrix-units] [--peak-by-part]

A work is a shape and the limit that its pool is held to. A step is bench_train.py's: one row of so many tokens, NF4
with double quantisation, r = 16, layers recomputed, their inputs offloaded in main memory. Per work: GB/s of a layer's
copy by itself; the step with streamed weights; the same with them on the device, without a limit (--resident: where
they fit); whether the losses are the same bits as there with what a run chooses for the limit; and what share of the
link's speed the copies of a step came to; and what a plan of these steps says. --dry: without a card, what the pool of
a large one would take, held to the limit; --peak-by-part: and, without the limit, what of.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from bench_train import GIB
from common import Report, median_spread
from count_launches import Counted, Counting, counting_device, print_parts

from wgrad.autograd.bind import bind
from wgrad.device.errors import OutOfMemory
from wgrad.train.commands.bench_model import SHAPES, RandomWeights, Shape, build, random_step
from wgrad.train.inference.generation import generate_ids
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.streamed_weights import HostLayer, StreamedWeights, arrays_of
from wgrad.train.model.weights import weight_specs
from wgrad.train.options.generate_config import GREEDY
from wgrad.train.options.option_text import parse_size
from wgrad.train.plan.plan import PROMPT_TOKENS, SAMPLE_TOKENS
from wgrad.wgsl.device import DryRunDevice, WgpuDevice

SETTLE_STEPS, TIMED_STEPS, SAMPLES = 3, 2, 3
LINK_COPIES = 20


def streamed_weights(config: ModelConfig, device: Any, mxfp4_experts: bool = False) -> StreamedWeights:
    """bench_train.py's weights, a layer at a time through the device into main memory."""
    source, dry = RandomWeights(device, mxfp4_experts), isinstance(device, DryRunDevice)
    specs = weight_specs(config)
    resident = {s.name: source.make(s) for s in specs if s.kind in ("norm", "bias", "router")}
    tables: dict[str, Any] = {}
    layers: list[HostLayer] = []
    before: tuple[list[Any], dict[str, Any]] = ([], {})
    for spec in specs:
        if spec.kind in ("embedding", "head"):
            tables[spec.name] = device.empty_host(spec.shape, source.normal.dtype)
            if not dry:
                device.write(tables[spec.name], source.table(spec))
    for number in range(config.num_hidden_layers):
        prefix = f"model.layers.{number}."
        own = [s for s in specs if s.is_linear and s.name.startswith(prefix)]
        kind = [(s.kind, s.shape) for s in own]
        if kind != before[0]:  # layers of the same sizes have the same random numbers
            before = (kind, {s.name: source.make(s) for s in own})
        made = dict(zip((s.name for s in own), before[1].values(), strict=True))
        layers.append(HostLayer.like(made, device))
        for array, place in zip(arrays_of(made), arrays_of(layers[-1].weights), strict=True):
            device.transfer(array, place)
        device.synchronize()
    del made, before
    device.trim()
    return StreamedWeights(device, resident, tables, layers)


def link_gb_per_second(device: Any, weights: StreamedWeights) -> float:
    """Measure a layer's copy to the device by itself."""
    source = weights._layers[0].buffer
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
    """To the device: each layer forward, each but the last two backward, and the head."""
    sizes = [layer.buffer.nbytes for layer in weights._layers]
    head = list(weights._tables.values())[-1]
    return sum(sizes) + sum(sizes[:-2]) + int(head.nbytes)


def sized(name: str, layers: int) -> Shape:
    return replace(SHAPES[name], layers=layers) if layers else SHAPES[name]


class Steps:
    """A model's steps on a device: `seconds` each, and the losses. held: the device keeps to the limit, by which in
    either case is chosen what a run chooses by it. layers: as many of them, where given."""

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
    ) -> None:
        options: dict[str, Any] = {"make_weights": streamed_weights} if streamed else {}
        options["memory_limit"] = limit and str(limit)
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
        """-> seconds a step, their spread, the losses."""
        self.run(SETTLE_STEPS)
        seconds, spread = median_spread([self.run(TIMED_STEPS) for _ in range(SAMPLES)])
        return seconds, spread, self.trainer.read_history()[:, 0]


def planned(name: str, limit: int, card: Any, args: argparse.Namespace) -> dict[str, float]:
    """Return what a dry run of the card takes, by which `wgrad plan` judges."""
    plan = card.dry_run()
    Steps(name, args.max_length, args.compute, plan, limit, True, layers=args.layers).run(2)
    return {"planned_gib": plan.memory().peak_bytes / GIB, "planned_host_gib": plan.host_memory().peak_bytes / GIB}


def open_card(device: str | None) -> Any:
    """Copies are made even where device memory is main memory: what is measured is them."""
    card = bind(WgpuDevice)(device)
    card.shared_memory = False
    return card


def bench(name: str, limit: int, args: argparse.Namespace, report: Report) -> None:
    row: dict[str, Any] = {"work": name, "layers": sized(name, args.layers).layers, "compute": args.compute}
    row |= {"seq_len": args.max_length, "limit_gib": limit / GIB}
    card = open_card(args.device)
    row |= planned(name, limit, card, args)
    steps = Steps(name, args.max_length, args.compute, card, limit, True, layers=args.layers)
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
    """With streamed weights, as a run: an evaluation and a sample, before and after steps, the second one recorded."""
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
    """A run where nothing runs, in the pool of a large card."""
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
    for name, limit in works(args.works):
        bench(name, limit, args, report)


if __name__ == "__main__":
    main()
