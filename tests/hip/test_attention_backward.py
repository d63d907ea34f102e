"""Flash attention's backward on the emulated card: the contract's cases, sizes that divide nothing, ranges, order."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest import check_case
from wgrad.autograd.selftest_cases import Case, cases
from wgrad.autograd.selftest_operators import BUILTIN_ULPS

CASES = [c for c in cases() if c.op == "attention_backward" and c.dtype != "float32" and c.shape.endswith(("x64", "x128"))]
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
NAMES = ("do", "q", "k", "v", "o", "lse", "starts")


def inputs(shape: tuple[int, ...], dtype: Any, *, documents: bool, window: int, size: float = 1.0) -> dict[str, Any]:
    """shape: B, T, H, G, D. size: of do. The forward's o and lse are the reference's."""
    rng = np.random.default_rng(5)
    b, t, h, g, d = shape
    x = {n: rng.standard_normal((b, t, heads, d)).astype(dtype) for n, heads in (("q", h), ("k", g), ("v", g))}
    starts = np.zeros((b, t), np.int32)
    if documents:
        starts[:, t // 3 :], starts[0, t - 5 :] = t // 3, t - 5
    o, lse = ReferenceDevice().attention(*x.values(), starts, np.zeros(1, np.int32), scale=d**-0.5, window=window)
    do = (rng.standard_normal(o.shape) * size).astype(dtype)
    return {**x, "starts": starts, "o": o, "lse": lse, "do": do}


def case(shape: tuple[int, ...], dtype: str, *, documents: bool = True, window: int = 0, size: float = 1.0) -> Case:
    def call(device: Any, x: Any) -> Any:
        found = device.attention_backward(*(x[n] for n in NAMES), scale=shape[-1] ** -0.5, window=window)
        return dict(zip(("dq", "dk", "dv"), found))

    def build(_rng: np.random.Generator) -> Any:
        return inputs(shape, DTYPES[dtype], documents=documents, window=window, size=size)

    text = "x".join(map(str, shape))
    return Case(f"attention_backward/{text}/{dtype}/{window}", "attention_backward", "backward", dtype, text, build, call, BUILTIN_ULPS)


SIZES = [
    case((1, 83, 6, 2, 64), "bfloat16"),
    case((1, 83, 3, 1, 128), "float16", window=19),
    case((2, 70, 2, 1, 128), "bfloat16", documents=False),
    case((1, 67, 2, 2, 64), "float16", window=1),
]


def check(device: Any, wanted: Case) -> None:
    result = check_case(wanted, device)
    assert result.ok, f"{result.output} is off by {result.error:.3g}, allowed {result.limit:.3g}"


@pytest.mark.parametrize("wanted", CASES, ids=lambda c: c.name)
def test_case(hip_device: Any, wanted: Case) -> None:
    check(hip_device, wanted)


@pytest.mark.parametrize("order", ["fwd", "rev"])
@pytest.mark.parametrize("wanted", SIZES, ids=lambda c: c.name)
def test_sizes_that_divide_nothing(hip_device: Any, wanted: Case, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WGRAD_EMULATED_ORDER", order)
    check(hip_device, wanted)


@pytest.mark.parametrize("wanted", SIZES[:2], ids=lambda c: c.name)
def test_rdna4(emulator: Any, wanted: Case) -> None:
    check(emulator.device("gfx1201"), wanted)


@pytest.mark.parametrize("size", [2.0**-10, 2.0**9])
def test_float16_gradients_keep_their_digits(hip_device: Any, size: float) -> None:
    """ds is far below (above) float16's range where do is small (large): as near as with do of size 1."""
    check(hip_device, case((1, 83, 2, 1, 64), "float16", size=size))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_splits_over_heads_and_runs_twice_alike(hip_device: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block of keys does not fill a card: each takes a share of the query heads. The same bits in any order of waves."""
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
    check(hip_device, case((1, 41, 6, 2, 64), dtype))


def test_only_what_the_kernels_serve_goes_to_them(hip_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    launch = hip_device.launch
    monkeypatch.setattr(hip_device, "launch", lambda source, *rest, **more: (seen.append(source), launch(source, *rest, **more)))
    check(hip_device, case((1, 5, 2, 1, 40), "float16"))
    assert set(seen) == {"attention_plain"}
    seen.clear()
    check(hip_device, case((1, 5, 2, 1, 64), "float16"))
    assert "attention_backward_dq" in seen and "attention_plain" not in seen
