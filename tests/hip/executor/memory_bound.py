"""hip_isa_memory: registers, spills and access widths of the memory-bound kernels, for every architecture.

`widths` counts what the code object holds (each kernel has a fast path of wide accesses and one element by element for
arrays that are not aligned); `executed`, where the executor knows the architecture, counts the global loads and stores
that waves made, by width in bits, in calls on aligned arrays of each type.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.autograd import norms
from tests.hip.executor.device import ExecutedDevice, shipped
from tests.hip.executor.isa import instructions, registers, widths
from tests.hip.executor.numbers import DTYPES
from tests.hip.executor.table import Object, Row
from wgrad.autograd.ops.decoding import sample_settings


class Arrays:
    """Random arrays on a device; of `dtype` unless told otherwise."""

    def __init__(self, device: Any, dtype: Any) -> None:
        self.device, self.dtype, self._rng = device, dtype, np.random.default_rng(0)

    def __call__(self, *shape: int, dtype: Any = None) -> Any:
        return self.device.upload(self._rng.standard_normal(shape).astype(dtype or self.dtype))

    def below(self, high: int, *shape: int, dtype: Any = np.int32) -> Any:
        return self.device.upload(self._rng.integers(0, high, shape).astype(dtype))

    def of(self, *values: float, dtype: Any = np.float32) -> Any:
        return self.device.upload(np.array(values, dtype))


def norm(d: Any, x: Arrays) -> None:
    for op in norms.NORMS:
        for rows, columns in ((4, 2048), (4, 1024), (32, 128)):
            a = {n: x(rows, columns) for n in norms.ROWS} | {n: x(columns, dtype=np.float32) for n in norms.COLUMNS}
            norms.backward(op, d, a | norms.forward(op, d, a))


def activation(d: Any, x: Arrays) -> None:
    a, b = x(32, 256), x(32, 256)
    d.swiglu_backward(a, b, d.swiglu(a, b))


def softmax(d: Any, x: Arrays) -> None:
    d.softmax_backward(x(32, 256), d.softmax(x(32, 256)))


def rope(d: Any, x: Arrays) -> None:
    tables = (x(8, 64, dtype=np.float32), x(8, 64, dtype=np.float32), x.below(8, 16))
    d.rope(x(16, 4, 128), *tables)
    new, caches = (x(16, 4, 128), x(16, 4, 128)), (x(2, 64, 4, 128), x(2, 64, 4, 128))
    d.rope_append(*new, *tables, *caches, x.of(16, dtype=np.int32))


def elementwise(d: Any, x: Arrays) -> None:
    a, keep = x(32, 256), x.below(2, 32, 256, dtype=np.uint32)
    for made in (d.add(a, x(32, 256)), d.scale(a, 2.0), d.bias(a, x(256, dtype=np.float32)), d.mask(a, keep, 0.0)):
        d.cast(made, np.float32)


def dropout(d: Any, x: Arrays) -> None:
    d.dropout(x(32, 256), 0.2, x.of(1, 2, dtype=np.uint32), 3)


def embedding(d: Any, x: Arrays) -> None:
    ids = x.below(8, 32)
    d.embedding(x(8, 256), ids, dtype=x.dtype)
    d.embedding_backward(x(32, 256), ids, 8)


def nf4(d: Any, x: Arrays) -> None:
    d.dequantize(d.quantize(x(32, 256), double=True), x.dtype)


def reduce(d: Any, x: Arrays) -> None:
    a = x(32, 256)
    d.sum_rows(a), d.sum(a)


def storage(d: Any, x: Arrays) -> None:
    d.kv_append(x(2, 64, 2, 64), x(2, 16, 2, 64), x.of(16, dtype=np.int32))
    a = x(32, 256)
    d.copy(x(32, 256), a)
    d.fill(a, 1.5)


def loss(d: Any, x: Arrays) -> None:
    if x.dtype == np.float32:
        d.linear_cross_entropy(x(4, 16), x(2048, 16), x.below(2048, 4))


def optimizer(d: Any, x: Arrays) -> None:
    if x.dtype == np.float32:
        p, g, m, v = (x(8192) for _ in range(4))
        hyper, state, scale = x.of(0.1, 1.0, 0.0, 0.0), d.zeros((8,)), x.of(1.0)
        d.clip(d.grad_norm(g), hyper, state, scale, beta1=0.9, beta2=0.999)
        options = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "decay_elements": 4096}
        d.adamw(p, g, m, d.mul(v, v), hyper, state, **options)


def decoding(d: Any, x: Arrays) -> None:
    if x.dtype == np.float32:
        d.sample(x(4096), x.of(0.5), d.upload(sample_settings(0.7, 20, 0.9)[None]))


FAMILIES = (norm, activation, softmax, rope, elementwise, dropout, embedding, nf4, reduce, storage, loss, optimizer,
            decoding)  # fmt: skip


def executed(made: Object) -> dict[str, dict[str, dict[str, int]]]:
    """Count loads and stores of each width by kernel and type, in families that launch this source."""
    device = ExecutedDevice(made.architecture)
    found: dict[str, dict[str, dict[str, int]]] = {}
    for kind, dtype in DTYPES.items():
        device.forget()
        for family in FAMILIES:
            dry = device.dry_run()
            family(dry, Arrays(dry, dtype))
            if made.source in {source for source, _ in dry.kernels}:
                family(device, Arrays(device, dtype))
        for kernel, counts in device.execution.accesses.items():
            named = {f"{what} {bits}": n for (what, bits), n in counts.items()}
            found.setdefault(kernel, {})[kind] = dict(sorted(named.items()))
    return found


def rows(made: Object, kernels: list[str], say: Callable[[str], None]) -> list[Row]:
    """A row for each kernel of a code object."""
    code = shipped(made.source, made.architecture)
    counts, found = executed(made), []
    for name in kernels:
        listing = instructions(code, name)
        counted = {kind: dict(sorted(n.items())) for kind, n in widths(listing).items()}
        row: Row = {"kernel": name, **registers(code, name), "sgpr": code.kernels[name][".sgpr_count"]}
        row |= {"instructions": len(listing), "widths": counted}
        row["dpp"] = sum(i.name.endswith("_dpp") for i in listing)
        row["lds_shuffles"] = sum(re.match("ds_(b?permute|swizzle)", i.name) is not None for i in listing)
        if name in counts:
            row["executed"] = counts[name]
        found.append(row)
        say(f"{name}: {len(listing)} instructions")
    return found
