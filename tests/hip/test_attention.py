"""Flash attention's forward on the emulated GPU: sizes that divide nothing, order, shares of the keys, rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.case_results import assert_case
from tests.hip.emulator.build import build_kernels
from tests.hip.executor.table import held, only
from wgrad.autograd.selftest.case import BUILTIN_ULPS, Case
from wgrad.device.errors import DeviceError

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
NAMES = ("q", "k", "v", "doc_start", "cache_len")
Shape = tuple[int, int, int, int, int, int]


def inputs(shape: Shape, dtype: str, *, packed: bool = True, size: float = 1.0) -> dict[str, Any]:
    """shape: B, T, S, H, G, D; the queries are the last T of S positions. size: of k, growing along the keys."""
    rng = np.random.default_rng(3)
    b, t, s, h, g, d = shape
    grow = np.linspace(0.1, 1.0, s)[:, None, None] * size
    q, k, v = (rng.standard_normal((b, n, heads, d)) for n, heads in ((t, h), (s, g), (s, g)))
    doc_start = np.zeros((b, t), np.int32)
    if packed:
        doc_start[:, t // 3 :], doc_start[0, t - 5 :] = s - t + t // 4, s - 7
    x = {"q": q, "k": k * grow, "v": v}
    return {n: a.astype(DTYPES[dtype]) for n, a in x.items()} | {
        "doc_start": doc_start,
        "cache_len": np.array([s - t], np.int32),
    }


def case(shape: Shape, dtype: str, *, packed: bool = True, window: int = 0, size: float = 1.0) -> Case:
    def call(device: Any, x: Any) -> Any:
        o, lse = device.attention(*(x[n] for n in NAMES), scale=shape[-1] ** -0.5, window=window)
        return {"o": o, "lse": lse}

    def build(_rng: np.random.Generator) -> Any:
        return inputs(shape, dtype, packed=packed, size=size)

    text = "x".join(map(str, shape))
    name = f"attention/{text}/{dtype}/{window}/{size}"
    return Case(name, "attention", "forward", dtype, text, build, call, BUILTIN_ULPS)


SIZES = [
    case((1, 83, 83, 6, 2, 64), "bfloat16"),
    case((1, 83, 150, 3, 1, 128), "float16", window=19),
    case((2, 70, 131, 2, 1, 128), "bfloat16", packed=False),
    case((1, 419, 419, 1, 1, 64), "float16"),  # more than one work-group's queries on every GPU
    case((1, 1, 77, 4, 2, 128), "bfloat16", packed=False),  # decoding
    case((1, 83, 150, 3, 1, 256), "float16", window=19),
    case((2, 131, 131, 2, 1, 256), "bfloat16"),
    case((1, 67, 67, 2, 2, 64), "float16", window=1),
    case((1, 70, 130, 1, 1, 64), "float16", window=31),  # the second wave sees nothing of a tile, and all of the next
    case((1, 40, 200, 2, 1, 64), "bfloat16", packed=False, size=40.0),  # the maximum rises by 2^8 and more, often
]


@pytest.mark.parametrize("order", ["fwd", "rev"])
@pytest.mark.parametrize("wanted", SIZES, ids=lambda c: c.name)
def test_sizes_that_divide_nothing_are_within_the_limits(
    hip_device: Any, wanted: Case, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WGRAD_EMULATED_ORDER", order)
    assert_case(wanted, hip_device)


@pytest.mark.parametrize("architecture", ["gfx90a", "gfx1201"])
@pytest.mark.parametrize("wanted", [*SIZES[:2], SIZES[5]], ids=lambda c: c.name)
def test_other_architectures_are_within_the_limits(emulator: Any, architecture: str, wanted: Case) -> None:
    assert_case(wanted, emulator.device(architecture))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_keys_in_shares_are_within_the_limits(
    hip_device: Any, launched: list[tuple[str, str]], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where queries do not fill a GPU, work-groups take shares of the keys; some queries see nothing of a share."""
    monkeypatch.setattr(hip_device, "compute_units", 7)
    assert_case(case((1, 5, 800, 2, 1, 64), dtype), hip_device)
    assert_case(case((1, 3, 801, 2, 1, 128), dtype, window=70), hip_device)
    assert_case(case((1, 3, 801, 2, 1, 256), dtype, window=70), hip_device)
    assert sum("combine" in kernel for _, kernel in launched) == 3


def mean_of_ones(device: Any) -> float:
    """The mean result where every value is 1: 1 but for the rounding of the probabilities."""
    x = inputs((1, 64, 256, 2, 2, 64), "bfloat16", packed=False)
    x["v"][:] = 1
    arrays = {n: device.upload(a) for n, a in x.items()}
    o, _ = device.attention(*(arrays[n] for n in NAMES), scale=0.125)
    return float(device.download(o).astype(np.float64).mean())


def test_probabilities_are_rounded_as_asked(hip_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 has 8 bits: cut off, a probability loses 2^-9 of itself on the average; to nearest, nothing."""
    means = {}
    for mode in ("rtne", "rtna", "rtz"):
        monkeypatch.setattr(hip_device, "attention_rounding", mode)
        means[mode] = 1 - mean_of_ones(hip_device)
        assert_case(case((1, 83, 83, 2, 1, 64), "bfloat16"), hip_device)
    assert abs(means["rtne"]) < 2.0**-11 and abs(means["rtna"]) < 2.0**-11
    assert 2.0**-10 < means["rtz"] <= 2.0**-8  # the result has steps of 2^-8 there


def test_an_unknown_rounding_is_refused(hip_device: Any) -> None:
    with pytest.raises(DeviceError, match="attention_rounding.*'up'.*rtne"):
        hip_device.attention_rounding = "up"


@pytest.mark.parametrize(
    "width, kernels", [(33, 64), (40, 64), (80, 128), (96, 128), (112, 128), (127, 128), (160, 256)]
)
def test_widths_between_are_widened(hip_device: Any, launched: list[tuple[str, str]], width: int, kernels: int) -> None:
    assert_case(case((1, 37, 70, 3, 1, width), "float16", window=31), hip_device)
    names = [name for _, name in launched]
    assert [n for n in names if "forward" in n] == [f"attention_forward_f16_{kernels}"]
    assert names.count("copy_columns") == 4  # q, k, v, o
    launched.clear()
    assert_case(case((2, 1, 40, 2, 2, width), "bfloat16"), hip_device)  # few keys, one query: as they are
    assert [source for source, _ in launched] == ["attention_plain"]


@pytest.mark.parametrize("shape", [(1, 5, 5, 2, 1, 32), (1, 5, 5, 2, 1, 10)])
def test_other_widths_go_to_the_plain_kernels(hip_device: Any, launched: list[tuple[str, str]], shape: Shape) -> None:
    assert_case(case(shape, "float16", packed=False), hip_device)
    assert [source for source, _ in launched] == ["attention_plain"]


def test_table_keeps_its_bars() -> None:
    with held("hip_attention", lambda r: r["source"] == "attention_forward") as rows:
        assert [(r["arch"], r["kernel"]) for r in rows if r["spills"] or r["scratch"]] == []
        for r in rows:
            # One rounding of P and one of the result to nearest; P cut off instead costs twice the first.
            assert "error" in r, r
            limit = 2.0**-10 if "_f16_" in r["kernel"] else 2.0**-7
            for key in ("error", "error_window", "error_splits"):
                for order, errors in r.get(key, {}).items():
                    assert errors["o"] < limit and errors["lse"] < 1e-5, (r["arch"], r["kernel"], key, order)
            if r["kernel"].endswith("_128") and r["arch"].startswith("gfx9"):
                loads = r["widths"]["global_load"]
                assert loads.get("buffer:128") and "buffer:64" not in loads, r


def test_tensor_cores_are_busy() -> None:
    """The peer, MoonMath's forward (RTNE, width 128, no mask), in the same model: 75.9 % at 300 clocks, 62.2 % at
    600."""
    chosen = "gfx942", "attention_forward_bf16_rtne_128"
    with held("hip_attention", lambda r: (r["arch"], r["kernel"]) == chosen) as rows:
        row = only(rows, chosen[1])
        assert row["busy"]["300"] >= 0.759 and row["busy"]["600"] >= 0.622
        assert row["busy_loop"]["300"] >= 0.759 and row["busy_loop"]["600"] >= 0.622
        for latency, share in row["busy"].items():
            assert row["busy_causal"][latency] >= share - 0.05


@pytest.mark.parametrize("mode", ["f16", "bf16_rtne"])
def test_tensor_cores_are_busy_with_heads_of_256(mode: str) -> None:
    """Simulate a whole run with a memory latency of 600 clocks and L1's bandwidth."""
    chosen = "gfx942", f"attention_forward_{mode}_256"
    with held("hip_attention", lambda r: (r["arch"], r["kernel"]) == chosen) as rows:
        row = only(rows, chosen[1])
        assert min(row["busy"]["600"], row["busy_l1"]["600"], row["busy_causal_l1"]["600"]) >= 0.56


def test_tensor_cores_of_rdna3_are_busy() -> None:
    """One work-group, which is two waves a SIMD, and two of them; no mask and causal."""
    with held("hip_attention", lambda r: r["arch"] == "gfx1100" and r["source"] == "attention_forward") as rows:
        for r in rows:
            halves = r["kernel"].endswith("_256")
            for waves, least in (("2", 0.25), ("4", 0.42)) if halves else (("2", 0.6), ("4", 0.7)):
                for key in "busy_by_waves", "busy_causal_by_waves":
                    assert r[key][waves]["600"] >= least, (r["kernel"], key, waves)


ROUNDING = """
#include "attention_matrix.hpp"
template <gpu::Round MODE>
GPU_FN void round_pairs(const float* x, gpu::u32* y) {
  for (int i = 0; i < 2; i++) {
    const gpu::u32 t = gpu::thread() + 64 * i;
    y[t] = attention::BF16<MODE>::pack(x[2 * t], x[2 * t + 1]);
  }
}
extern "C" GPU_KERNEL(64) void rounding(const float* x, gpu::u32* y) {
  round_pairs<gpu::Round::RTNE>(x, y), round_pairs<gpu::Round::RTNA>(x, y + 128);
  round_pairs<gpu::Round::RTZ>(x, y + 256);
}
"""


def test_ties_of_probabilities_are_rounded_by_their_mode(hip_device: Any, emulator: Any, tmp_path: Path) -> None:
    """No score can be told to give a tie: the function itself, on every number half-way between two of bfloat16."""
    (tmp_path / "rounding.hip").write_text(ROUNDING)
    build_kernels(tmp_path / "rounding.hip", hip_device.architecture, emulator.folder)
    bits = 0x3F808000 + 0x10000 * np.arange(256, dtype=np.uint32)
    x, y = bits.view(np.float32), hip_device.empty((3, 128), np.uint32)
    hip_device.launch("rounding", "rounding", [hip_device.upload(x), y], (1, 1, 1), threads=64)
    wanted = [x.astype(ml_dtypes.bfloat16).view(np.uint16), bits + 0x8000 >> 16, bits >> 16]  # even, away, to zero
    np.testing.assert_array_equal(hip_device.download(y).view(np.uint16), wanted)
