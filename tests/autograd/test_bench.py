"""The bench's entries and costs: every operator is timed, its arguments are accepted everywhere, and what it must do
is counted right; and where it is placed below the roofs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from wgrad.autograd.bench.cost import _FLOP, _IN_PART, _PER_ELEMENT, _WRITTEN, Cost, cost
from wgrad.autograd.bench.derived import _look, derived
from wgrad.autograd.bench.entries import entries, entries_of
from wgrad.autograd.bench.entry import SIZES, Entry
from wgrad.autograd.bench.roofline import MEMORY, TENSOR_CORES, Machine, MeasuredRoof, dtypes, place
from wgrad.autograd.bench.timing import Time, median_spread
from wgrad.autograd.operators import OPERATORS
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest.calls import first_call
from wgrad.device.formats.nf4 import NF4Array

TINY = SIZES["tiny"]


def can_be_derived(op: str) -> bool:
    return _look(op) is not None


def test_every_operator_of_the_contract_has_an_entry_and_a_cost(cpu: ReferenceDevice) -> None:
    """Written, or derived from its largest array; where that does not bound the work, FLOP are written as well."""
    for sizes in SIZES.values():
        found = {e.op for e in entries(cpu, sizes)}
        assert set(OPERATORS) - found == set(), "these have neither: write an entry in autograd/bench"
    counted = set(_FLOP) | set(_PER_ELEMENT)
    missing = {op for op in set(OPERATORS) - counted if not can_be_derived(op)}
    assert missing == set(), "FLOP of these follow from no array of theirs: write them in autograd/bench/cost.py"
    assert counted <= set(OPERATORS) and not set(_FLOP) & set(_PER_ELEMENT)
    assert [e.op for e in entries(cpu, TINY, ("softmax", "rope"))] == ["rope", "softmax"]


def test_what_is_derived_is_bounded_by_its_largest_array() -> None:
    """No product, nothing that looks up rows, nothing with heads."""
    assert {"add", "softmax_backward", "layer_norm", "adamw", "dropout", "mask"} <= set(
        filter(can_be_derived, OPERATORS)
    )
    for op in (*_FLOP, "embedding", "rope", "rope_split", "rope_append", "kv_append", "paged_append", "dequantize"):
        assert not can_be_derived(op), op
    (found,) = derived("layer_norm_backward", SIZES["small"], np.dtype(np.float16))
    given = found.build(ReferenceDevice())
    rows, columns = SIZES["small"].rows, SIZES["small"].columns
    assert found.name == f"layer_norm_backward/{rows}x{columns}/float16"
    assert {n: (a.shape, a.dtype.name) for n, a in given.items() if hasattr(a, "shape")} == {
        **dict.fromkeys(("dy", "x"), ((rows, columns), "float16")),
        **dict.fromkeys(("mean", "rstd"), ((rows,), "float32")),
        "weight": ((columns,), "float32"),
    }
    assert derived("adamw", TINY, np.dtype(np.float16)) == []


@pytest.mark.parametrize("op", sorted(OPERATORS))
def test_what_an_operator_writes_into_its_arguments_is_counted(op: str) -> None:
    """Beside `out`, which is what it returns."""
    given = {n: a.copy() if isinstance(a, np.ndarray) else a for n, a in first_call(op).items()}
    before = {n: a.tobytes() for n, a in given.items() if isinstance(a, np.ndarray)}
    getattr(ReferenceDevice(), op)(**given)
    changed = {n for n, held in before.items() if given[n].tobytes() != held}
    counted = {*_WRITTEN.get(op, ()), *_IN_PART.get(op, ())}
    assert changed - {"out"} <= counted, "name the arguments that it writes in _WRITTEN of autograd/bench/cost.py"


def test_small_products_are_timed(cpu: ReferenceDevice) -> None:
    for name in ("small", "large"):
        shapes = {e.shape for e in entries(cpu, SIZES[name], ("gemm",))}
        assert {f"{side}x{side}x{side}" for side in (128, 256, 512)} <= shapes


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_entry_is_a_call_that_a_device_takes(dtype: str, wgpu_device: Any) -> None:
    """On a device where nothing runs: arguments, and that each is counted."""
    if dtype == "float16" and not wgpu_device.float16:
        pytest.skip("the device has no float16")
    dry, names = wgpu_device.dry_run(), []
    for entry in entries_of(TINY, np.dtype(dtype)):
        given = entry.build(dry)
        spent = cost(entry.op, given, getattr(dry, entry.op)(**given))
        assert spent.flop > 0 and spent.nbytes > 0, entry.name
        names.append(entry.name)
    if dtype == "float16":  # beside those of float32, from which they are told by their names
        names += [e.name for e in entries(ReferenceDevice(), TINY)]
    assert len(set(names)) == len(names)


def costs(device: Any) -> dict[str, Cost]:
    found = {}
    for entry in entries(device, TINY):
        given = entry.build(device)
        found[entry.name] = cost(entry.op, given, getattr(device, entry.op)(**given))
    return found


def test_costs_are_those_of_the_formulas(cpu: ReferenceDevice) -> None:
    found = costs(cpu)

    def is_cost(name: str, flop: float, nbytes: float) -> None:
        assert (found[name].flop, found[name].nbytes) == (flop, nbytes), name

    for ways in ("nn", "nt", "tn"):
        is_cost(f"gemm/{ways}/64x64x64/float32", 2 * 64**3, 3 * 64 * 64 * 4)
    is_cost("gemm/lora nt/16x16x64/float32", 2 * 16 * 16 * 64, 4 * (16 * 64 + 16 * 64 + 16 * 16))
    is_cost("gemm/lora gradient tn/16x64x16/float32", 2 * 16 * 64 * 16, 4 * (16 * 16 + 16 * 64 + 16 * 64))
    arrays = 16 * 128 + 2 * 128 * 16 + 2 * 16 * 32  # dy, b and db, u and du of two parts
    is_cost("lora_grads/16x128x16/float32", 2 * (2 * 16 * 128 * 16), 4 * arrays)
    blocks = 64 * 64 // 64
    nested = 64 * 64 // 2 + blocks + 4 * (blocks + 255) // 256 * 1 + 0
    weight = NF4Array.quantize(np.ones((64, 64), np.float32), 64, True)
    held = sum(a.nbytes for a in weight.arrays().values() if a is not None)
    assert nested <= held <= nested + 2048  # codes, a byte a block, and small tables
    is_cost("linear_quantized/nf4/16x64x64/float32", 2 * 16 * 64 * 64, 4 * 2 * 16 * 64 + held)
    lowrank = 2 * 16 * 64 * 16
    extra = 4 * (16 * 16 + 16 * 64)
    name = "linear_quantized_backward/nf4 lowrank/16x64x64/float32"
    is_cost(name, 2 * 16 * 64 * 64 + lowrank, 4 * 2 * 16 * 64 + held + extra)
    # B T H G D = 1 32 2 1 64: half of the square; q o, k v, lse, doc_start, cache_len
    forward, read = 4 * 2 * 64 * 32 * 16, 4 * (32 * 2 * 64 + 2 * 32 * 64) + 4 * 32 + 4
    is_cost("attention/causal/1x32x2x1x64/float32", forward, read + 4 * (32 * 2 * 64 + 2 * 32))
    assert found["attention_backward/causal/1x32x2x1x64/float32"].flop == 2.5 * forward
    assert found["attention/one of 32 keys/1x1x2x1x64/float32"].flop == 4 * 2 * 64 * 32
    n, v, c = TINY.loss
    assert found[f"linear_cross_entropy/dx/{n}x{v}x{c}/float32"].flop == 4 * n * v * c + 6 * n * v
    count = TINY.rows * TINY.columns
    assert found[f"adamw/{count}/float32"].nbytes == 28 * count + 4 * (4 + 8)
    tokens, width = TINY.tokens, TINY.columns
    assert found[f"embedding/{tokens}x{v}x{width}/float32"].nbytes == 2 * 4 * tokens * width + 4 * tokens
    assert found[f"rms_norm/{TINY.rows}x{width}/float32"].nbytes == 4 * (2 * count + width + TINY.rows)
    _, _, _, g, d = TINY.attention[-1]
    assert found[f"kv_append/{tokens}x{g}x{d}/float32"].nbytes == 2 * 4 * tokens * g * d + 4
    assert found[f"cast/to float16/{TINY.rows}x{width}/float32"].nbytes == 6 * count


def machine(**roofs: float) -> Machine:
    found = {MEMORY: 100.0, "float32": 1000.0, **{name.replace("_", " "): value for name, value in roofs.items()}}
    return Machine({n: MeasuredRoof(n, v, 0.0, "") for n, v in found.items()}, 1.0)


def placed(op: str, dtype: str, spent: Cost, seconds: float, **roofs: float) -> Any:
    device: Any = SimpleNamespace(fastest_compute="float16" if roofs else "float32")
    entry = Entry(op, "", "", dtype, lambda device: {})
    return place(device, machine(**roofs), entry, spent, Time(seconds, 0.1))


def test_an_operator_is_placed_below_the_roof_that_bounds_it() -> None:
    row = placed("softmax", "float32", Cost(50, 1000), 20.0)  # 10 s of memory
    assert (row.bound, row.roof, row.share, row.intensity) == ("memory", MEMORY, 0.5, 0.05)
    assert "loads" in row.look_at
    assert "nothing here" in placed("softmax", "float32", Cost(50, 1000), 11.0).look_at
    assert "the launch" in placed("softmax", "float32", Cost(50, 100), 2.0).look_at
    row = placed("gemm", "float32", Cost(40000, 1000), 50.0, tensor_cores=8000.0)
    assert (row.bound, row.roof, row.share) == ("arithmetic", "float32", 0.8)
    assert "tensor cores" in row.look_at
    # Only products in the type of the tensor cores are measured by those.
    row = placed("gemm", "float16", Cost(40000, 1000), 50.0, tensor_cores=8000.0)
    assert (row.bound, row.roof, row.share) == ("memory", MEMORY, 0.2)
    row = placed("gemm", "float16", Cost(160000, 1000), 50.0, tensor_cores=8000.0)
    assert (row.roof, row.share) == (TENSOR_CORES, 0.4) and "tiles" in row.look_at
    assert placed("softmax", "float16", Cost(160000, 1000), 200.0, tensor_cores=8000.0).roof == "float32"


def test_16_bits_are_timed_where_the_device_has_them() -> None:
    def names(**device: Any) -> list[str]:
        return [t.name for t in dtypes(SimpleNamespace(**device), SIZES["large"])]  # type: ignore[arg-type]

    assert names(name="cpu") == ["float32"]
    assert names(name="wgpu", fastest_compute="float32", float16=True) == ["float32", "float16"]
    assert names(name="wgpu", fastest_compute="float32", float16=False) == ["float32"]
    assert names(name="hip", fastest_compute="bfloat16", float16=True) == ["float32", "bfloat16"]


def test_median_spread_returns_median_and_half_width() -> None:
    assert median_spread([3.0, 1.0, 2.0]) == Time(2.0, 1.0)
