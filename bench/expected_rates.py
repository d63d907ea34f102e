"""Expected tokens/s of a QLoRA step on GPUs that have not been measured, to check their first reports against.

    python bench/expected_rates.py [--max-length 2048] [--write]

The step is bench_train.py's at batch 1 with nothing recomputed; its launches come from a dry run. A launch takes as
long as its arithmetic, or as its arrays at the memory's rate, whichever is longer, and a few microseconds at least.
Peaks are the makers'. The share of a peak that the kernels reach is a range: the lower end was measured on an H100
(bench/results), the upper end is what the inner loops allow (bench/notes/expected-rates.md). The first rows are GPUs
with measurements, as a check.

--write: the table goes into bench/notes/expected-rates.md.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bench_train import build, random_step, shape_of
from count_launches import counting_device

HERE = Path(__file__).parent
NOTE = HERE / "notes" / "expected-rates.md"
SHAPES = ("smollm2-135m", "llama-3.2-1b", "llama-3.1-8b")
MARK = "<!-- expected -->"


@dataclass(frozen=True)
class Gpu:
    """Peaks of a GPU: TFLOP/s in float32 and of float16 tensor cores that sum in float32 (0: wgrad cannot use them
    there), GB/s of its memory. single: float32 without instructions that do two operations at once."""

    name: str
    float32: float
    tensor: float
    memory: float
    single: float = 0.0
    measured: str = ""  # as bench/results names it


GPUS = (
    Gpu("H100 SXM", 66.9, 989.0, 3350.0, measured="NVIDIA H100 80GB HBM3"),
    Gpu("H200", 66.9, 989.0, 4800.0, measured="NVIDIA H200"),
    Gpu("RTX 4090", 82.6, 165.2, 1008.0),
    Gpu("RX 7900 XTX", 61.4, 122.8, 960.0, single=30.7),
    Gpu("RX 9070 XT", 48.7, 194.6, 640.0, single=24.3),
    Gpu("Strix Halo (Radeon 8060S)", 29.7, 59.4, 256.0, single=14.8),
    Gpu("Arc B580", 14.6, 0.0, 456.0),
    Gpu("M4 Max, 40 cores", 18.4, 0.0, 546.0),
)


@dataclass(frozen=True)
class Shares:
    """The share of a peak that launches of each kind reach."""

    gemm: float
    attention: float
    tensor_gemm: float
    tensor_attention: float
    memory: float
    microseconds: float  # that a launch takes at least


# From bench/results of an H100: GEMM 35 of 66.9 TFLOP/s in float32 and 283 of 989 on tensor cores at 4096^3; attention
# of 32 heads of 128, whose backward has 180 of 989; LoRA's GEMMs and elementwise kernels between 0.35 and 0.85 of the
# memory's rate.
LOW = Shares(0.50, 0.35, 0.25, 0.18, 0.60, 20.0)
# The inner loops: FMA is 0.86 of a float32 GEMM's instructions; on tensor cores 0.63 of the cycles on RDNA 3, and of
# attention's 0.46.
HIGH = Shares(0.86, 0.60, 0.63, 0.46, 0.85, 5.0)


def step_launches(name: str, seq_len: int, tensor_cores: bool) -> Counter[tuple[str, float, int]]:
    """The launches of the second step: (shader, work, bytes) and how many."""
    device = counting_device(tensor_cores)
    shape = replace(shape_of(name, False), checkpointing=False)
    trainer, _ = build(shape, seq_len, device, "float16" if tensor_cores else "float32", batch=1)
    for index in range(2):
        device.work.clear()
        trainer.step(random_step(index, seq_len, shape.vocab, 1), 1e-4)
    return Counter(device.work)


def seconds(launches: Counter[tuple[str, float, int]], gpu: Gpu, shares: Shares, float32: float) -> float:
    """The time of a step. float32: the peak in TFLOP/s that counts."""
    total = 0.0
    for (shader, work, nbytes), number in launches.items():
        tensor, attention = "matrix" in shader, shader.startswith("attention")
        rate = 0.0
        if tensor:
            rate = gpu.tensor * (shares.tensor_attention if attention else shares.tensor_gemm)
        elif attention or shader.startswith("gemm"):
            rate = float32 * (shares.attention if attention else shares.gemm)
        arithmetic = work / (rate * 1e12) if rate else 0.0
        total += number * max(arithmetic, nbytes / (gpu.memory * shares.memory * 1e9), shares.microseconds * 1e-6)
    return total


def expected(launches: Counter[tuple[str, float, int]], gpu: Gpu, seq_len: int) -> tuple[float, float]:
    """The lower and upper end, in tokens/s."""
    slow = seconds(launches, gpu, LOW, gpu.single or gpu.float32)
    return seq_len / slow, seq_len / seconds(launches, gpu, HIGH, gpu.float32)


def measured(gpu: Gpu, shape: str, compute: str) -> float:
    """The best that was measured, in tokens/s; 0 where nothing was."""
    found = [0.0]
    for file in sorted((HERE / "results").glob("*.jsonl")):
        for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            if (row.get("stack"), row.get("work"), row.get("compute")) != ("wgrad", shape, compute):
                continue
            plain = row.get("batch") == 1 and row.get("seq_len") == 2048 and not row.get("checkpointing")
            plain = plain and not row.get("int8_products")
            if plain and gpu.measured and str(row.get("device", "")).startswith(gpu.measured):
                found.append(row["tokens_per_second"])
    return max(found)


def rounded(rate: float) -> str:
    digits = max(0, len(str(int(rate))) - 2)
    return f"{round(rate, -digits):,.0f}"


def rows(seq_len: int) -> Iterator[str]:
    yield "| GPU | compute | " + " | ".join(SHAPES) + " |"
    yield "| --- | --- |" + " --- |" * len(SHAPES)
    launches = {(name, tensor): step_launches(name, seq_len, tensor) for name in SHAPES for tensor in (False, True)}
    for gpu in GPUS:
        for tensor in (False, True) if gpu.tensor else (False,):
            compute, cells = "float16" if tensor else "float32", []
            for name in SHAPES:
                low, high = expected(launches[name, tensor], gpu, seq_len)
                known = measured(gpu, name, compute)
                cells.append(f"{rounded(low)} to {rounded(high)}" + (f" (measured {known:,.0f})" if known else ""))
            units = "float16, tensor cores" if tensor else "float32"
            yield f"| {gpu.name} | {units} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    table = "\n".join(rows(args.max_length))
    print(table)
    if args.write:
        before, _, after = NOTE.read_text(encoding="utf-8").split(MARK)
        NOTE.write_text(f"{before}{MARK}\n{table}\n{MARK}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
