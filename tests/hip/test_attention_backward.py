"""Flash attention's backward on the emulated GPU: sizes that divide nothing, ranges, order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.case_results import assert_case
from tests.hip.executor.table import held, only
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest.case import BUILTIN_ULPS, Case
from wgrad.hip.attention.attention_backward import _row_dots as row_dots

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
NAMES = ("do", "q", "k", "v", "o", "lse", "doc_start")


def inputs(
    shape: tuple[int, ...], dtype: Any, *, documents: bool, window: int, powers: tuple[int, int, int, int], scale: float
) -> dict[str, Any]:
    """shape: B, T, H, G, D. powers: of two, of do, v, q, k. The forward's o and lse are the reference's."""
    rng = np.random.default_rng(5)
    b, t, h, g, d = shape
    heads = {"do": h, "v": g, "q": h, "k": g}
    x = {n: (rng.standard_normal((b, t, heads[n], d)) * 2.0**power).astype(dtype) for n, power in zip(heads, powers)}
    doc_start = np.zeros((b, t), np.int32)
    if documents:
        doc_start[:, t // 3 :], doc_start[0, t - 5 :] = t // 3, t - 5
    origin = np.zeros(1, np.int32)
    o, lse = ReferenceDevice().attention(x["q"], x["k"], x["v"], doc_start, origin, scale=scale, window=window)
    return {**x, "doc_start": doc_start, "o": o, "lse": lse}


def case(
    shape: tuple[int, ...],
    dtype: str,
    *,
    documents: bool = True,
    window: int = 0,
    powers: tuple[int, int, int, int] = (0, 0, 0, 0),
    scale: float | None = None,
) -> Case:
    scale = shape[-1] ** -0.5 if scale is None else scale

    def call(device: Any, x: Any) -> Any:
        found = device.attention_backward(*(x[n] for n in NAMES), scale=scale, window=window)
        return dict(zip(("dq", "dk", "dv"), found))

    def build(_rng: np.random.Generator) -> Any:
        return inputs(shape, DTYPES[dtype], documents=documents, window=window, powers=powers, scale=scale)

    op, text = "attention_backward", "x".join(map(str, shape))
    return Case(f"{op}/{text}/{dtype}/{window}/{scale:.3g}", op, "backward", dtype, text, build, call, BUILTIN_ULPS)


SIZES = [
    case((1, 83, 6, 2, 64), "bfloat16"),
    case((1, 83, 3, 1, 128), "float16", window=19),
    case((2, 70, 2, 1, 128), "bfloat16", documents=False),
    case((1, 67, 2, 2, 64), "float16", window=1),
    case((1, 83, 3, 1, 256), "float16", window=19),
    case((2, 131, 2, 1, 256), "bfloat16"),
]


@pytest.mark.parametrize("order", ["fwd", "rev"])
@pytest.mark.parametrize("wanted", SIZES, ids=lambda c: c.name)
def test_sizes_that_divide_nothing_are_within_the_limits(
    hip_device: Any, wanted: Case, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WGRAD_EMULATED_ORDER", order)
    assert_case(wanted, hip_device)


@pytest.mark.parametrize("wanted", [*SIZES[:2], SIZES[4]], ids=lambda c: c.name)
def test_rdna4_is_within_the_limits(emulator: Any, wanted: Case) -> None:
    assert_case(wanted, emulator.device("gfx1201"))


def test_cdna2_is_within_the_limits(emulator: Any) -> None:
    assert_case(SIZES[4], emulator.device("gfx90a"))


@pytest.mark.parametrize("scale", [-0.125, 0.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_that_is_not_positive_takes_the_plain_kernels(hip_device: Any, dtype: str, scale: float) -> None:
    """The matrix kernels take the highest score before they scale it: the plain kernels serve this."""
    assert_case(case((1, 41, 2, 1, 64), dtype, window=19, scale=scale), hip_device)


@pytest.mark.parametrize("powers", [(-10, -6, -8, 8), (-10, -6, 8, -8), (7, 7, -7, -7)])
def test_float16_gradients_keep_their_digits(hip_device: Any, powers: tuple[int, int, int, int]) -> None:
    """ds below float16's smallest normal number (seen in dq, then in dk), and above its largest."""
    assert_case(case((1, 83, 2, 1, 64), "float16", powers=powers), hip_device)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_lengths_are_of_whole_rows(hip_device: Any, width: int) -> None:
    """float16's range goes by the lengths of do and v: of those that have only their last 16 elements, and where delta
    says nothing, as v and -v take turns before queries that see all alike."""
    wanted = case((1, 32, 1, 1, width), "float16", documents=False, powers=(0, 0, -20, 0))
    x = dict(wanted.inputs())
    x["do"][..., :-16], x["v"][..., :-16] = 0, 0
    x["v"][:, 1::2] = -x["v"][:, ::2]
    mask = x["doc_start"], np.zeros(1, np.int32)
    x["o"], x["lse"] = ReferenceDevice().attention(x["q"], x["k"], x["v"], *mask, scale=width**-0.5)
    assert_case(replace(wanted, build=lambda _rng: x), hip_device)


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_row_has_its_dot_product_and_length(hip_device: Any, dtype: str, width: int) -> None:
    """Rows far longer than their neighbors, of more than one work-group."""
    rng = np.random.default_rng(7)
    x, y = (rng.standard_normal((2, 11, 3, width)).astype(DTYPES[dtype]) for _ in range(2))
    x[:, ::2, 1] *= 64
    dots, lengths = (hip_device.zeros((2, 3, 11)) for _ in range(2))
    row_dots(hip_device, hip_device.upload(x), hip_device.upload(y), dots, lengths)
    wide_x, wide_y = x.astype(np.float64), y.astype(np.float64)
    wanted = np.einsum("bthd,bthd->bht", wide_x, wide_y)
    np.testing.assert_allclose(hip_device.download(dots), wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(hip_device.download(lengths), np.linalg.norm(wide_x, axis=3).swapaxes(1, 2), rtol=1e-6)


def test_lengths_are_of_their_heads(hip_device: Any) -> None:
    """float16's range goes by the rows of do and v of the same head and batch element: the last ones are long. Behind
    the last length nothing may be read."""
    wanted = case((2, 44, 4, 2, 64), "float16", documents=False, powers=(-6, -4, 0, 0))
    x = dict(wanted.inputs())
    x["do"][1, :, 3] *= 4096
    x["v"][1, :, 1] *= 4096
    # Half of the keys against the other half, before queries that see all alike: delta, which bounds ds too, is 0.
    x["do"][1, :21, 3], x["do"][1, ::2, 3], x["q"][1, :, 3] = 0, 0, 0
    x["v"][1, 1::2, 1] = -x["v"][1, :-1:2, 1]
    mask = x["doc_start"], np.zeros(1, np.int32)
    x["o"], x["lse"] = ReferenceDevice().attention(x["q"], x["k"], x["v"], *mask, scale=0.125)
    assert_case(replace(wanted, build=lambda _rng: x), hip_device)


def test_arrays_beyond_32_bits_of_bytes_go_to_the_plain_kernels(hip_device: Any) -> None:
    """The matrix kernels address 2^32 bytes of a batch element, a tile beyond the end too."""
    for length, plain in ((32_768 - 1024, False), (32_768 - 100, True), (32_768, True)):
        dry = hip_device.dry_run()
        x, of = dry.empty((1, length, 256, 256), np.float16), {"scale": 0.0625}
        rows, origin = dry.empty((1, length), np.int32), dry.empty((1,), np.int32)
        _, lse = dry.attention(x, x, x, rows, origin, **of)
        dry.attention_backward(x, x, x, x, x, lse, rows, **of)
        found = {name for name, _ in dry.kernels if name.startswith("attention_")}
        assert (found == {"attention_plain"}) == plain, (length, found)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_splits_over_heads_and_runs_twice_alike(
    hip_device: Any, launched: list[tuple[str, str]], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a block of keys does not fill a GPU, each takes a share of the query heads; the same bits in any order."""
    x = {n: hip_device.upload(a) for n, a in case((1, 41, 6, 2, 64), dtype).inputs().items()}

    def run(units: int) -> list[np.ndarray]:
        monkeypatch.setattr(hip_device, "compute_units", units)
        found = hip_device.attention_backward(*(x[n] for n in NAMES), scale=0.125)
        return [hip_device.download(a).view(np.uint16) for a in found]

    first = run(6)
    monkeypatch.setenv("WGRAD_EMULATED_ORDER", "rev")
    for one, other in zip(first, run(6)):
        np.testing.assert_array_equal(one, other)
    monkeypatch.setattr(hip_device, "compute_units", 6)
    assert_case(case((1, 41, 6, 2, 64), dtype), hip_device)
    assert sum(name.startswith("attention_sum_parts") for _, name in launched) == 3 * 2  # runs, dk and dv


def test_only_what_the_kernels_serve_goes_to_them(hip_device: Any, launched: list[tuple[str, str]]) -> None:
    assert_case(case((1, 5, 2, 1, 32), "float16"), hip_device)
    assert {source for source, _ in launched} == {"attention_plain"}
    launched.clear()
    assert_case(case((1, 5, 2, 1, 64), "float16"), hip_device)
    seen = {source for source, _ in launched}
    assert "attention_backward_dq" in seen and "attention_plain" not in seen


@pytest.mark.parametrize("width, dtype", [(40, "float16"), (80, "bfloat16"), (96, "float16"), (112, "bfloat16")])
def test_widths_between_are_widened(hip_device: Any, launched: list[tuple[str, str]], width: int, dtype: str) -> None:
    assert_case(case((1, 41, 2, 1, width), dtype), hip_device)
    names = [name for _, name in launched]
    assert any("_dq_" in name for name in names) and "attention_plain_dq" not in names
    assert names.count("copy_columns") == 5 + 3  # do, q, k, v, o; dq, dk, dv


def test_table_keeps_its_bars() -> None:
    """No spills; rounding only."""
    with held("hip_attention", lambda r: "_backward_" in r["source"]) as rows:
        assert [(r["arch"], r["kernel"]) for r in rows if r["spills"] or r["scratch"]] == []
        for r in rows:
            assert r["widths"]["global_load"].keys() <= {"buffer:128", "global:32"}, r  # lse and delta: one a row
            errors = {**r.get("error", {}), **{f"window {k}": e for k, e in r.get("error_window", {}).items()}}
            assert all(e < (2.0**-7 if "bf16" in r["kernel"] else 2.0**-10) for e in errors.values()), r


@pytest.mark.parametrize(
    ("half", "width", "least"),
    [("dq", 128, 0.65), ("dkv", 128, 0.65), ("dq", 64, 0.6), ("dkv", 64, 0.6), ("dq", 256, 0.58), ("dkv", 256, 0.41)],
)
def test_tensor_cores_are_busy(half: str, width: int, least: float) -> None:
    """Simulate a whole run (causal, length 1,024) with a memory latency of 600 clocks and L1's bandwidth."""
    source = f"attention_backward_{half}"
    with held("hip_attention", lambda r: (r["arch"], r["source"]) == ("gfx942", source)) as rows:
        for kind in ("bf16", "f16"):
            row = only(rows, f"{source}_{kind}_{width}")
            assert min(row["busy"]["600"], row["busy_l1"]["600"], row["busy_loop"]["600"]) >= least


def test_tensor_cores_of_rdna3_are_busy() -> None:
    """Simulate a causal run of length 2,304 at 600 clocks of latency: two waves per SIMD, and as many as fit."""
    with held("hip_attention", lambda r: r["arch"] == "gfx1100" and "_backward_" in r["source"]) as rows:
        for r in rows:
            halves = 0.54 if "_dq_" in r["kernel"] else 0.42
            least = halves if r["kernel"].endswith("_256") else 0.65
            assert all(share["600"] >= least for share in r["busy_causal_by_waves"].values()), r
