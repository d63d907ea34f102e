"""Registers, spills and access widths of the memory-bound kernels of hip/, in the code objects of every architecture.

    WGRAD_RUN_HSACO=.../run_hsaco.py TINYGRAD_DIR=.../tinygrad python bench/hip_isa_memory.py [--arch gfx942] [--only x]

A row of bench/results/hip_isa_memory.jsonl is one kernel of one architecture: what isa_report.py, beside run_hsaco.py,
reads from the code object (each kernel has a fast path of wide accesses and one element by element for arrays that are
not aligned), and, where the executor knows the architecture, the global loads and stores that waves executed, by width
in bits, in one call on aligned arrays of each type. A run with --only prints its rows and leaves the file alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from hip_executor import ARCHITECTURES, NEEDS, ExecutedDevice, available, code_object
from hip_table import inspector, object_digest

from wgrad.hip.runtime.compile import KERNELS, SHIPPED

OUT = Path(__file__).parent / "results" / "hip_isa_memory.jsonl"
TYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
_NOT_MEMORY = ("gemm", "gemv", "linear", "attention_plain", "attention_forward", "attention_backward_d")


def memory_sources() -> list[str]:
    """Names of the files of memory-bound kernels."""
    return sorted(p.stem for p in KERNELS.glob("*.hip") if not p.stem.startswith(_NOT_MEMORY))


def calls(device: Any, dtype: Any) -> Iterator[None]:
    """Each operator on aligned arrays of one type; what the executor runs between two steps is one operator's."""
    rng = np.random.default_rng(0)

    def normal(*shape: int, kind: Any = dtype) -> Any:
        return device.upload(rng.standard_normal(shape).astype(kind))

    def integers(high: int, *shape: int) -> Any:
        return device.upload(rng.integers(0, high, shape).astype(np.int32))

    for rows, columns in ((4, 2048), (4, 1024), (32, 128)):
        x, dy, more, weight = (*(normal(rows, columns) for _ in range(3)), normal(columns, kind=np.float32))
        _, rstd = device.rms_norm(x, weight, 1e-5)
        yield
        device.rms_norm_backward(dy, x, weight, rstd, residual_grad=more)
        yield
    x, y = normal(32, 256), normal(32, 256)
    device.swiglu_backward(x, y, device.swiglu(x, y))
    device.softmax_backward(x, device.softmax(y))
    tables = (normal(8, 64, kind=np.float32), normal(8, 64, kind=np.float32), integers(8, 16))
    device.rope(normal(16, 4, 128), *tables)
    yield
    start = device.upload(np.array([16], np.int32))
    device.rope_append(
        normal(16, 4, 128), normal(16, 4, 128), *tables, normal(2, 64, 4, 128), normal(2, 64, 4, 128), start
    )
    yield
    keep = device.upload(rng.integers(0, 2, (32, 256)).astype(np.uint32))
    for made in (device.add(x, y), device.scale(x, 2.0), device.bias(x, normal(256)), device.mask(x, keep, 0.0)):
        device.cast(made, np.float32)
    yield
    device.dropout(x, 0.2, device.upload(np.array([1, 2], np.uint32)), 3)
    ids = integers(8, 32)
    device.embedding(normal(8, 256), ids, dtype=dtype)
    device.embedding_backward(x, ids, 8)
    yield
    device.nf4_dequantize(device.nf4_quantize(x, double=True), dtype)
    device.sum_rows(x)
    device.sum(x)
    yield
    device.kv_append(normal(2, 64, 2, 64), normal(2, 16, 2, 64), start)
    device.copy(x, y)
    device.fill(y, 1.5)
    yield
    if dtype == np.float32:
        yield from float_calls(device, normal, integers)


def float_calls(device: Any, normal: Any, integers: Any) -> Iterator[None]:
    """Operators that know only float32."""
    device.linear_cross_entropy(normal(4, 16), normal(2048, 16), integers(2048, 4))
    yield
    p, g, m, v = (normal(8192) for _ in range(4))
    norm, hyper = device.grad_norm(g), device.upload(np.array([0.1, 1.0, 0.0, 0.0], np.float32))
    state, scale = device.zeros((8,)), device.upload(np.ones(1, np.float32))
    device.clip(norm, hyper, state, scale, beta1=0.9, beta2=0.999)
    v = device.mul(v, v)
    device.adamw(
        p, g, m, v, hyper, state, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decay_elements=4096
    )  # fmt: skip
    yield
    half = device.upload(np.array([0.5], np.float32))
    device.sample(normal(4096), half, temperature=0.7, top_k=20, top_p=0.9)
    yield


def executed(architecture: str, folder: Path) -> dict[str, dict[str, dict[str, int]]]:
    """By kernel and type: how many loads and stores of each width the waves executed."""
    device = ExecutedDevice(architecture, folder)
    device.count_accesses()
    found: dict[str, dict[str, dict[str, int]]] = {}
    for name, dtype in TYPES.items():
        device.forget()
        for _ in calls(device, dtype):
            pass
        for kernel, counts in device.execution.accesses.items():
            found.setdefault(kernel, {})[name] = dict(sorted(counts.items()))
    return found


def rows(architecture: str, folder: Path) -> list[dict[str, Any]]:
    """One for each kernel of the memory-bound sources."""
    report = inspector()
    counts = executed(architecture, folder) if architecture in ARCHITECTURES else {}
    made = []
    for source in memory_sources():
        path = code_object(source, architecture, folder)
        for kernel in report.report(str(path), None, 1)["kernels"]:
            widths = {name: dict(sorted(found.items())) for name, found in kernel["widths"].items() if found}
            row = {"arch": architecture, "source": source, "kernel": kernel["name"], "object": object_digest(path)}
            row |= {"vgpr": kernel["vgpr_total"], "sgpr": kernel["sgpr"]}
            row |= {"spills": kernel["vgpr_spills"] + kernel["sgpr_spills"]}
            row |= {"scratch": kernel["scratch_bytes"], "lds": kernel["lds_bytes"]}
            row |= {"instructions": kernel["counts"]["instructions"], "widths": widths}
            row |= {"dpp": kernel["counts"]["dpp"], "lds_shuffles": kernel["counts"]["bpermute_swizzle"]}
            if kernel["name"] in counts:
                row["executed"] = counts[kernel["name"]]
            made.append(row)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", action="append", choices=SHIPPED)
    parser.add_argument("--only", default="", help="part of a kernel's name")
    parser.add_argument("--objects", type=Path, help="keep code objects in this folder")
    arguments = parser.parse_args()
    if not available():
        print(f"skipped: {NEEDS}", file=sys.stderr)
        return 0
    architectures = arguments.arch or list(SHIPPED)
    kept = [json.loads(line) for line in OUT.read_text().splitlines()] if OUT.exists() else []
    table = [] if arguments.only else [r for r in kept if r["arch"] not in architectures]
    with tempfile.TemporaryDirectory() as scratch:
        for architecture in architectures:
            made = rows(architecture, arguments.objects or Path(scratch))
            table += [row for row in made if arguments.only in row["kernel"]]
    table.sort(key=lambda row: (row["arch"], row["source"], row["kernel"]))
    text = "".join(json.dumps(row) + "\n" for row in table)
    if arguments.only:
        print(text, end="")
    else:
        OUT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
