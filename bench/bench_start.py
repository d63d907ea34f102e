"""Seconds until a run's first step: reading a checkpoint's files, loading and quantizing it, and a run's first step.

    python bench/bench_start.py [--shapes llama-3.2-1b,llama-3.1-8b] [--folder DIR] [--cold] [--no-quantize]

Checkpoints of random numbers in bfloat16, in shards as the hub has them, are written into the folder first (a temporary
one if left out). `read`: their bytes through one buffer of 16 MiB. `load`: what a run does with them, on an open device
with built pipelines. Both in turns, with the files in the page cache; --cold: also once after dropping them from it.
`start`: `wgrad finetune` in a process of its own, alone on the GPU, from its start to the line of its first step,
without an evaluation before; the median of runs with pipelines in the driver's cache and Python's bytecode in its own.
`first_step_cold_s`: the run before them, which may have neither.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from bench_train import SHAPES, Shape
from common import Report

from wgrad.autograd.bench import timing
from wgrad.autograd.bench.timing import median_spread
from wgrad.autograd.bind import bind
from wgrad.train.files.safetensors_files import from_arrays, write_safetensors
from wgrad.train.model.load_config import parse_model_config
from wgrad.train.model.load_weights import Loader
from wgrad.train.model.model_files import INDEX_FILE
from wgrad.train.model.weights import weight_specs
from wgrad.wgsl.device import WgpuDevice

EXAMPLES = Path(__file__).parents[1] / "examples"
SHARD_BYTES = 5_000_000_000
BLOCK_BYTES = 16 << 20
SAMPLES = 3
TOKENS = 1024  # of the example's tokenizer
# Of two steps, so that the line of the first does not wait until the run has been saved.
TRAIN = (
    "--max-steps 2 --max-length 512 --batch-size 1 --gradient-accumulation-steps "
    "1 --logging-steps 1 --eval-fraction 0 --no-sample".split()
)


def write_checkpoint(shape: Shape, folder: Path) -> list[Path]:
    """Write a checkpoint whose tensors repeat one random block, and return its shards."""
    folder.mkdir(parents=True)
    for file in (EXAMPLES / "base_model").iterdir():
        if file.suffix == ".json" and not file.name.startswith("model"):
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(shape.config()))
    block = (0.02 * np.random.default_rng(0).standard_normal(1 << 20)).astype(ml_dtypes.bfloat16)
    shards: list[dict[str, Any]] = [{}]
    sizes = [0]
    for spec in weight_specs(parse_model_config(shape.config())):
        nbytes = 2 * int(np.prod(spec.shape))
        if sizes[-1] + nbytes > SHARD_BYTES:
            shards.append({})
            sizes.append(0)
        shards[-1][spec.name] = spec.shape
        sizes[-1] += nbytes
    paths, weight_map = list[Path](), dict[str, str]()
    for number, shard in enumerate(shards):
        paths.append(folder / f"model-{number + 1:05}-of-{len(shards):05}.safetensors")
        write_safetensors(paths[-1], from_arrays({name: np.resize(block, shape) for name, shape in shard.items()}))
        weight_map |= dict.fromkeys(shard, paths[-1].name)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    os.sync()  # else writes of a run would wait for these
    return paths


def read(paths: list[Path]) -> None:
    buffer = bytearray(BLOCK_BYTES)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop_from_cache(paths: list[Path]) -> None:
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def load(folder: Path, shape: Shape, device: Any, quantize: bool) -> None:
    Loader(folder, parse_model_config(shape.config()), quantize).all(device, stacked=device.stacks_weights)
    device.synchronize()


def first_step(folder: Path, out: Path, device: str | None, quantize: bool) -> dict[str, float]:
    """Seconds from the start of the process to its lines: the model's, the first step's."""
    spec = [] if device is None else ["--device", f"wgpu:{device}"]
    data = ["--model", str(folder), "--data", str(EXAMPLES / "data" / "proverbs.jsonl"), "--out", str(out)]
    more = [] if quantize else ["--no-quantize"]
    command = [sys.executable, "-u", "-m", "wgrad", "finetune", *data, *TRAIN, *spec, *more]
    begin, found = time.perf_counter(), dict[str, float]()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            for what, opening in (("device_s", "device:"), ("model_s", "model:"), ("first_step_s", "step 1/")):
                if line.startswith(opening):
                    found.setdefault(what, time.perf_counter() - begin)
    if "first_step_s" not in found:
        raise SystemExit("".join(said[-20:]))
    return found


def shape_of(name: str) -> Shape:
    return replace(SHAPES[name], vocab=max(SHAPES[name].vocab, TOKENS))


def starts(places: Path, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Return a text per measured line, by its name."""
    outs = [folder / f"out-{i}" for i in range(1 + timing.SAMPLES)]
    runs = [first_step(places, out, args.device, not args.no_quantize) for out in outs]
    medians = {what: median_spread([run[what] for run in runs[1:]]) for what in runs[0]}
    said = {what: median.seconds for what, median in medians.items()}
    return {**said, "spread": medians["first_step_s"].spread, "first_step_cold_s": runs[0]["first_step_s"]}


def bench_load(name: str, paths: list[Path], args: argparse.Namespace, device: Any, report: Report) -> dict[str, Any]:
    """Measure the loading of a checkpoint, and return the first columns of its rows."""
    shape, quantize = shape_of(name), not args.no_quantize
    gigabytes = sum(path.stat().st_size for path in paths) / 1e9
    row = {"work": name, "quantized": quantize, "gigabytes": gigabytes}
    places = paths[0].parent
    read(paths)
    load(places, shape, device, quantize)  # pipelines, the pool's blocks
    reads, loads = [], []
    for _ in range(SAMPLES):
        reads.append(seconds(lambda: read(paths)))
        loads.append(seconds(lambda: load(places, shape, device, quantize)))
    read_s, load_s = median_spread(reads), median_spread(loads)
    report.row(
        **row, cache="warm", read_s=read_s.seconds, load_s=load_s.seconds, spread=load_s.spread,
        of_reading=load_s.seconds / read_s.seconds,
    )  # fmt: skip
    if args.cold:
        drop_from_cache(paths)
        cold_read = seconds(lambda: read(paths))
        drop_from_cache(paths)
        cold = seconds(lambda: load(places, shape, device, quantize))
        report.row(**row, cache="cold", read_s=cold_read, load_s=cold, of_reading=cold / cold_read)
        read(paths)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=None, help="adapter index or name (default: the best)")
    parser.add_argument("--shapes", default="llama-3.2-1b,llama-3.1-8b")
    parser.add_argument("--folder", default=None, help="for the checkpoints, with room for them")
    parser.add_argument("--cold", action="store_true", help="read and load once more from the disk")
    parser.add_argument("--no-quantize", action="store_true", help="as the option of finetune")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    names = args.shapes.split(",")
    with tempfile.TemporaryDirectory(dir=args.folder, ignore_cleanup_errors=True) as text:
        folder = Path(text)
        checkpoints = {name: write_checkpoint(shape_of(name), folder / name) for name in names}
        runs = {name: starts(folder / name, folder / f"{name}-runs", args) for name in names}
        device = bind(WgpuDevice)(args.device)
        report = Report("start", device, args.out)
        for name, paths in checkpoints.items():
            row = bench_load(name, paths, args, device, report)
            report.row(**row, cache="warm", **runs[name])


if __name__ == "__main__":
    main()
