"""Tokens/s and memory of whole QLoRA steps on the shapes of known models, with random weights.

    python bench/bench_train.py [--shapes smollm2-135m,llama-3.2-1b,llama-3.1-8b] [--batch 1,8] [--profile] [--out FILE]
        [--gradient-checkpointing] [--offload-activations [N]] [--keep-attention] [--int8-matmul]
        [--as-finetune [--memory-limit 16GiB,24GiB]] [--[no-]keep-dequantized] [--layers N] [--adapt-experts 0,1]

Settings: NF4 with double quantization, r = 16 on all seven projections, AdamW; by default sequence length 2048,
batch 1, float32 compute. Experts have LoRA with --adapt-experts 1. A step is what the training loop does: one
micro-batch (recorded, replayed) and one update.
--as-finetune leaves checkpointing and offloading to wgrad, as `wgrad finetune` does by default; each memory limit is a
run of its own. Peers are bench/peer_peft.py (PEFT + bitsandbytes) and bench/peer_unsloth.py, each a process of its own,
started from here where CUDA is available: --peers names the shapes, --stacks the peers. With --as-finetune they run
with and without checkpointing, and wgrad once more within the least memory that they took.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from common import Report, has_cuda
from streamed import streamed_weights

from wgrad.autograd.bench.timing import median_spread
from wgrad.autograd.bind import bind
from wgrad.device.errors import WgradError
from wgrad.train.commands.bench_model import SHAPES, Shape, build, random_step
from wgrad.train.model.load_config import parse_model_config
from wgrad.train.model.weights import weight_specs
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.plan.fit import Fit
from wgrad.train.plan.settle import settle
from wgrad.train.ranks.world import World
from wgrad.train.step.memory import limit_bytes
from wgrad.train.step.room import room_of
from wgrad.wgsl.device import WgpuDevice

GIB = 1 << 30
SETTLE_STEPS, TIMED_STEPS, SAMPLES = 3, 4, 5
SAMPLE_SECONDS = 2.0  # where steps are long a sample has fewer
Way = tuple[bool, int, bool]  # of a peer: checkpointing, batch, whether experts are adapted
WITH_EXPERTS = ("q_proj", "k_proj", "v_proj", "o_proj", "experts.gate_up_proj", "experts.down_proj")


def shape_of(name: str, checkpointing: bool, layers: int = 0) -> Shape:
    """Return the shape of that name.

    checkpointing: Recompute its layers although it fits without. layers: So many layers instead, recomputed only if
    checkpointing is given.
    """
    shape = SHAPES[name]
    if layers:
        return replace(shape, layers=layers, checkpointing=checkpointing)
    return replace(shape, checkpointing=True) if checkpointing else shape


def add_memory_options(parser: argparse.ArgumentParser) -> None:
    """Add options that take less or more memory than the shapes' defaults."""
    parser.add_argument("--gradient-checkpointing", action="store_true", help="recompute the layers of every shape")
    parser.add_argument(
        "--offload-activations",
        nargs="?",
        const=True,
        default=False,
        type=int,
        metavar="N",
        help="and keep their inputs in main memory, or those of the first N",
    )
    parser.add_argument("--keep-attention", action="store_true", help="of recomputed layers, with their inputs")


def chosen(
    shape: Shape, seq_len: int, device: WgpuDevice, compute: Any, batch: int, memory_limit: str | None, **more: Any
) -> dict[str, Any]:
    """Return the options that `wgrad finetune` would choose besides `more`, and hold the device to its limit."""
    given: dict[str, Any] = {"batch_size": batch, "max_length": seq_len, "compute": compute, "sample": False, **more}
    options = RunOptions(gradient_accumulation_steps=1, memory_limit=memory_limit, **given)
    device.limit_memory(limit_bytes(memory_limit))  # of measuring its rates too
    with tempfile.TemporaryDirectory() as folder:
        write_shape(shape, Path(folder))
        room = room_of(options, device)
        fit = Fit(options, parse_model_config(shape.config()), folder, device, 1, room.limit or 0)
        settled = settle(options, fit, room, World(), pinned=True)
    if settled.limit is not None:
        device.limit_memory(settled.limit)
    print(*settled.lines, sep="\n", flush=True)
    return more | settled.mode


def write_shape(shape: Shape, folder: Path) -> None:
    """A model folder to plan with: its tensors are holes in a file."""
    (folder / "config.json").write_text(json.dumps(shape.config()), encoding="utf-8")
    entries, end = dict[str, Any](), 0
    for spec in weight_specs(parse_model_config(shape.config())):
        parts: list[tuple[str, str, tuple[int, ...], int]] = [(spec.name, "BF16", spec.shape, 2)]
        if shape.mxfp4_experts and spec.kind == "experts":
            blocks = (*spec.shape[:-1], spec.shape[-1] // 32)
            parts = [(f"{spec.name}_blocks", "U8", (*blocks, 16), 1), (f"{spec.name}_scales", "U8", blocks, 1)]
        for name, dtype, sizes, nbytes in parts:
            begin, end = end, end + nbytes * int(np.prod(sizes))
            entries[name] = {"dtype": dtype, "shape": sizes, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)


def bench(
    name: str, batch: int, args: argparse.Namespace, compute: str, device: WgpuDevice, report: Report,
    limit: str | None = None, experts: bool = False,
) -> None:  # fmt: skip
    offload, seq_len = args.offload_activations, args.max_length
    shape = shape_of(name, args.gradient_checkpointing or bool(offload), args.layers)
    mode = {} if args.keep_dequantized is None else {"keep_dequantized": args.keep_dequantized}
    mode |= {"target_modules": WITH_EXPERTS} if experts else {}
    layers = {}
    if args.as_finetune:
        begun = time.perf_counter()
        mode = chosen(shape, seq_len, device, compute, batch, limit, **mode)
        layers = {"memory_limit": limit, "planned_s": time.perf_counter() - begun}
    how: dict[str, Any] = {"offload": offload, "keep_attention": args.keep_attention, "memory_limit": limit}
    if mode.get("stream_weights") == "on":
        how["make_weights"] = partial(streamed_weights, resident=mode.get("resident_layers") or 0)
    trainer, parameters = build(shape, seq_len, device, compute, batch=batch, mode=mode, **how)
    if args.as_finetune:
        offload = trainer.model.offload
        layers["resident_layers"] = mode.get("resident_layers")
        layers["recomputed"] = trainer.model.recomputed
    index = 0

    def steps(count: int) -> float:
        nonlocal index
        start = time.perf_counter()
        for _ in range(count):
            trainer.step(random_step(index, seq_len, shape.vocab, batch), 1e-4)
            index += 1
        device.synchronize()
        return (time.perf_counter() - start) / count

    steps(SETTLE_STEPS - 1)
    timed = max(1, min(TIMED_STEPS, int(SAMPLE_SECONDS / steps(1))))
    compiled, reserved = device.pipelines_compiled(), device.memory().reserved_bytes
    samples = [steps(timed) for _ in range(SAMPLES)]
    seconds, spread = median_spread(samples)
    memory, losses = device.memory(), trainer.read_history()[:, 0]
    replays = [replay for r in (trainer._micro_step, trainer._update) for replay in r._replays]
    dispatches = sum(replay.dispatches for replay in replays)
    host = host_seconds(replays, device)
    report.row(
        work=work_of(name, args, experts), stack="wgrad", compute=compute, batch=batch, seq_len=seq_len,
        checkpointing=trainer.model.recomputed > 0, offload_checkpoints=offload, layers=shape.layers, **layers,
        attention_kept=trainer.model.keep_attention, norms_kept=trainer.model.keep_norms,
        dequantized_kept=trainer.dequantized.count, dequantized_gib=trainer.dequantized.nbytes / GIB,
        int8_products=args.int8_matmul,
        tokens_per_second=batch * seq_len / seconds, ms_per_step=1e3 * seconds, spread=spread,
        peak_gib=memory.peak_bytes / GIB, reserved_gib=memory.peak_reserved_bytes / GIB,
        fragmentation=memory.fragmentation, dispatches=dispatches, trainable=parameters.count,
        host_us_per_dispatch=1e6 * host.recording / max(dispatches, 1),
        submit_us_per_dispatch=1e6 * host.submitting / max(dispatches, 1), waited_ms=1e3 * host.waiting,
        new_pipelines=device.pipelines_compiled() - compiled, grown_bytes=memory.reserved_bytes - reserved,
        first_loss=float(losses[0]), last_loss=float(losses[-1]),
    )  # fmt: skip
    if args.profile:
        print_profile(device, steps, seconds)


def print_profile(device: WgpuDevice, steps: Callable[[int], float], seconds: float) -> None:
    """Print the times of kernels in two more steps, and the share of a step of `seconds` in which none runs."""
    device.profile()
    steps(2)
    print(device.profile_table())
    busy = sum(device.profiler.total_ns.values()) / 2e9
    print(f"device idle: {1 - busy / seconds:.1%} of a step ({1e3 * busy:.2f} of {1e3 * seconds:.2f} ms in kernels)")
    device.profile(False)


@dataclass(frozen=True)
class Host:
    """Seconds of one replayed step on the host.

    CPU time of the main thread for recording and of the queue's thread for submitting, and the time waited because the
    device was more than MAX_IN_FLIGHT submissions behind.
    """

    recording: float
    submitting: float
    waiting: float


def host_seconds(replays: list[Any], device: WgpuDevice) -> Host:
    """The median of SAMPLES replays, each begun with an idle device."""
    samples = []
    for _ in range(SAMPLES):
        device.synchronize()
        queue = device._queue
        waited, submitting_cpu = queue.waited, queue.submitting_cpu
        begun = time.thread_time()
        for replay in replays:
            if replay is not None:
                replay.run()
        cpu = time.thread_time() - begun
        waiting = queue.waited - waited
        device.synchronize()
        samples.append(Host(cpu, queue.submitting_cpu - submitting_cpu, waiting))
    return sorted(samples, key=lambda host: host.recording)[SAMPLES // 2]


def work_of(name: str, args: argparse.Namespace, experts: bool) -> str:
    """Return the name of a shape in rows. experts: they are adapted, too."""
    return name + f", {args.layers} layers" * bool(args.layers) + ", experts adapted" * experts


def peer(
    stack: str, name: str, shape: Shape, ways: list[Way], args: argparse.Namespace, report: Report
) -> dict[tuple[int, bool], float]:
    """Add a peer's rows of a shape, and return the least peak memory in GiB by batch and whether experts are adapted.

    Settings that fail or do not fit have no row.
    """
    command = [
        sys.executable,
        str(Path(__file__).with_name(f"peer_{stack}.py")),
        json.dumps(shape.config()),
        str(args.max_length),
    ]
    command += [str(int(value)) for way in ways for value in way]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"stack"')]
    if len(rows) < len(ways):
        print("peer failed:", done.stderr[-800:])
    peaks = dict[tuple[int, bool], float]()
    for row in rows:
        experts = row.pop("adapt_experts")
        report.row(work=work_of(name, args, experts), **row)
        key = row["batch"], experts
        peaks[key] = min(row["peak_gib"], peaks.get(key, row["peak_gib"]))
    return peaks


def peers(
    name: str, batches: list[int], adapted: list[bool], args: argparse.Namespace, report: Report
) -> dict[tuple[int, bool], float]:
    """Run the peers of a shape, and return the least memory in GiB that they take by batch and what is adapted."""
    if name not in args.peers.split(",") or not has_cuda():
        return {}
    shape = shape_of(name, args.gradient_checkpointing or bool(args.offload_activations), args.layers)
    checkpointing = (False, True) if args.as_finetune else (shape.checkpointing,)
    ways, peaks = list(product(checkpointing, batches, adapted)), dict[tuple[int, bool], float]()
    for stack in args.stacks.split(","):
        for key, peak in peer(stack, name, shape, ways, args, report).items():
            peaks[key] = min(peak, peaks.get(key, peak))
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=None, help="adapter index or name (default: the best)")
    parser.add_argument("--shapes", default="smollm2-135m,llama-3.2-1b,llama-3.1-8b")
    parser.add_argument("--compute", default="float32")
    parser.add_argument("--batch", default="1", help="rows of a step, each a run")
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=0, help="as many layers, none recomputed unless asked for")
    parser.add_argument("--adapt-experts", default="0", help="1: LoRA on attention and experts; each a run")
    parser.add_argument("--peers", default="", help="shapes to run the peers on as well")
    parser.add_argument("--stacks", default="peft", help="which peers: peft, unsloth")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--as-finetune", action="store_true", help="choose what to recompute and offload by memory")
    parser.add_argument("--memory-limit", default="", help="of --as-finetune; several with commas")
    parser.add_argument(
        "--keep-dequantized", action=argparse.BooleanOptionalAction, help="as of wgrad finetune (default: its choice)"
    )
    parser.add_argument("--int8-matmul", action="store_true", help="as of wgrad finetune")
    add_memory_options(parser)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    report = Report("train", bind(WgpuDevice)(args.device), args.out)
    batches = [int(batch) for batch in args.batch.split(",")]
    adapted = [bool(int(experts)) for experts in args.adapt_experts.split(",")]
    for name in args.shapes.split(","):
        peaks = peers(name, batches, adapted, args, report)
        for experts, batch, compute in product(adapted, batches, args.compute.split(",")):
            limits, peak = args.memory_limit.split(","), peaks.get((batch, experts))
            limits += [f"{peak:.2f}GiB"] if args.as_finetune and peak else []
            for limit in limits:
                # A device of its own for each, so that one's memory does not count for the next: a device refers to
                # itself, so that only a collection releases it.
                gc.collect()
                device: Any = bind(WgpuDevice)(args.device)
                if args.int8_matmul:
                    device.round_products()
                try:
                    bench(name, batch, args, compute, device, report, limit or None, experts)
                except WgradError as error:  # more than the limit
                    print(f"{work_of(name, args, experts)}, batch {batch}:", error, flush=True)
                del device


if __name__ == "__main__":
    main()
