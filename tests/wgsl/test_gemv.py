"""Products of few rows: every number of them, with each way of adding up a team's sums, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.wgsl.launches import launched
from wgrad.autograd.bind import bind
from wgrad.device.formats.frozen_weight import formats
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.gemm import gemv
from wgrad.wgsl.gemm.gemm import matmul
from wgrad.wgsl.gemm.gemm_epilogue import Epilogue
from wgrad.wgsl.gemm.gemv import MOST_ROWS, VectorTile, choose_tile

F32, F16, BF16 = np.float32, np.float16, ml_dtypes.bfloat16
# What the weight is, how many results a row, how long its rows are (they divide by what the format wants, no more).
WEIGHTS = [
    ("nf4", 131, 1096, F32),
    ("nf4 nested", 66, 72, F16),
    ("q8_0", 45, 1056, F16),
    (F32, 77, 1003, F32),
    (F16, 130, 516, F16),
    (BF16, 9, 1, F32),
]
KINDS = ("software", "subgroups", "workgroup")


@pytest.fixture(scope="module")
def _devices() -> dict[str, Any]:
    return {}


@pytest.fixture
def devices(wgpu_device: Any, _devices: dict[str, Any]) -> dict[str, Any]:
    for name in KINDS if not _devices else ():
        device = _devices[name] = bind(WgpuDevice)()
        device.software, device.subgroups = name == "software", name != "workgroup" and device.subgroups
    return _devices


def weight_of(kind: Any, n: int, k: int, rng: np.random.Generator, device: Any) -> tuple[Any, np.ndarray]:
    """Return a weight on the device, and its values in float64."""
    values = rng.standard_normal((n, k)).astype(F32)
    if not isinstance(kind, str):
        return device.upload(values.astype(kind)), values.astype(kind).astype(np.float64)
    name, *nested = kind.split()
    weight = formats()[name].quantize(values, 64, bool(nested))
    return weight.map_arrays(device.upload), weight.rows(0, n, np.dtype(np.float64))


ROWS = {
    "software": (1, 2, 5, 8),
    "subgroups": (*range(1, 10), MOST_ROWS, MOST_ROWS + 1),
    "workgroup": (1, 3, 8, MOST_ROWS),
}


@pytest.mark.parametrize("kind, m", [(kind, m) for kind in KINDS for m in ROWS[kind]])
def test_every_number_of_rows_takes_its_kernel(
    m: int, kind: str, devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two kinds of weight for each, in turn, with all that is added; one row more takes the kernels of tiles."""
    device, rng = devices[kind], np.random.default_rng(m)
    names = launched(device, monkeypatch)
    for weight_kind, n, k, dtype in (WEIGHTS[m % 6], WEIGHTS[(m + 3 + m // 6) % 6]):
        if np.dtype(dtype) == F16 and not device.float16:
            dtype = F32
        weight, values = weight_of(weight_kind, n, k, rng, device)
        x, bias = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal(n).astype(F32)
        residual = rng.standard_normal((m, n)).astype(dtype)
        u, v = rng.standard_normal((m, 5)).astype(F32), rng.standard_normal((n, 5)).astype(F32)
        added: dict[str, Any] = {"bias": device.upload(bias), "residual": device.upload(residual), "dtype": F32}
        added["lowrank"] = (device.upload(u), device.upload(v))
        if isinstance(weight_kind, str):
            y = device.linear_quantized(device.upload(x), weight, **added)
        else:
            y = device.gemm(device.upload(x), weight, trans_b=True, **added)
        exact = x.astype(np.float64) @ values.T + u.astype(np.float64) @ v.T + bias + residual
        size = np.abs(x.astype(np.float64)) @ np.abs(values).T + 10
        assert np.all(np.abs(device.download(y) - exact) <= 2e-6 * size), (weight_kind, dtype)
    assert ("gemv" in names) == (m <= MOST_ROWS)


# Units for all lanes of a team, and for some.
@pytest.mark.parametrize(("kind", "n", "k"), [(KINDS[1], 45, 1280), (KINDS[0], 5, 256)])
@pytest.mark.parametrize(
    ("name", "m"),
    [*((name, 1) for name in sorted(formats())), *((name, m) for name in ("q5_k", "q6_k") for m in (4, 8, MOST_ROWS))],
)
def test_few_rows_of_every_format_are_within_the_limits(
    name: str, m: int, kind: str, n: int, k: int, devices: Any
) -> None:
    """The fewer, the more elements are read at once. Each row of the weight has its own scales in every group."""
    device, rng = devices[kind], np.random.default_rng(3)
    values = rng.standard_normal((n, k // 16, 16)) * np.exp2(rng.integers(-6, 3, (n, k // 16, 1)))
    weight = formats()[name].quantize(values.reshape(n, k).astype(F32))
    x = rng.standard_normal((m, k)).astype(F32)
    y = device.linear_quantized(device.upload(x), weight.map_arrays(device.upload))
    decoded = weight.rows(0, n, np.dtype(np.float64))
    exact, size = x.astype(np.float64) @ decoded.T, np.abs(x.astype(np.float64)) @ np.abs(decoded.T)
    assert np.all(np.abs(device.download(y) - exact) <= 2e-6 * size)


@pytest.mark.parametrize(
    "tile", [VectorTile(128, 32), VectorTile(64, 64), VectorTile(256, 256), VectorTile(64, 4)], ids=str
)
@pytest.mark.parametrize("kind", KINDS[1:])
def test_every_tile_is_within_the_limits(tile: VectorTile, kind: str, devices: Any) -> None:
    """Rows that end within a unit, within a turn of the team and within a workgroup's columns."""
    device, rng = devices[kind], np.random.default_rng(1)
    (n, k), out = (131, 1003), device.upload(np.full((2, 131), np.nan, F32))
    weight, values = weight_of(F32, n, k, rng, device)
    x = rng.standard_normal((2, k)).astype(F32)
    matmul(device, device.upload(x), weight, Epilogue(out, 0.5), trans_b=True, tile=tile)
    exact = 0.5 * (x.astype(np.float64) @ values.T)
    assert np.abs(device.download(out) - exact).max() <= 2e-6 * (np.abs(x) @ np.abs(values).T).max()


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_input_gives_the_same_bits(kind: str, devices: Any) -> None:
    device, rng = devices[kind], np.random.default_rng(2)
    weight, _ = weight_of("nf4 nested", 1030, 1096, rng, device)
    x = device.upload(rng.standard_normal((3, 1096)).astype(F32))
    one, other = (device.download(device.linear_quantized(x, weight)).tobytes() for _ in range(2))
    assert one == other


def test_elements_read_at_once() -> None:
    """As many as one scale is for (of Q6_K two), up to 128 products of an element and a row; never fewer than with many
    rows, nor so many that a row ends within them."""
    rows = (1, 3, 4, 5, 8, 9, MOST_ROWS)
    for name, units in (
        ("q5_k", (32, 32, 32, 16, 16, 8, 8)),
        ("q6_k", (32, 32, 32, 16, 16, 8, 8)),
        ("nf4", (32, 32, 32, 16, 16, 8, 8)),
    ):
        weight = formats()[name].quantize(np.zeros((1, 256), F32))
        assert tuple(gemv.unit_of(weight, m) for m in rows) == units, name
    few = tuple(gemv.unit_of(weight, m, few_registers=True) for m in rows[:5])
    assert few == (32, 16, 16, 8, 8)  # half of the products
    for width, unit in ((264, 8), (272, 16), (288, 32)):
        assert gemv.unit_of(formats()["nf4"].quantize(np.zeros((1, width), F32)), 1) == unit


def test_sums_of_units_are_scaled(devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A team multiplies few rows, where the elements are not rounded themselves."""
    device = devices["subgroups"]
    found: list[Any] = []
    launch = device.launch

    def noted(shader: str, *rest: Any, **options: Any) -> None:
        found.append(rest[3]["FACTORED"])
        launch(shader, *rest, **options)

    monkeypatch.setattr(device, "launch", noted)
    weight = formats()["nf4"].quantize(np.ones((8, 1024), F32)).map_arrays(device.upload)
    rounded = replace(weight, value_dtype="bfloat16")  # type: ignore[type-var]
    for rows, w in ((1, weight), (4, weight), (5, weight), (1, rounded)):
        device.linear_quantized(device.upload(np.ones((rows, 1024), F32)), w)
    assert found == [True, True, False, False]


def test_few_results_get_many_invocations_each() -> None:
    """Few results: many invocations each; no more than there are units; what every WebGPU device has room for."""
    assert choose_tile(1, 128256, 4096, 8, False).lanes == 32
    assert choose_tile(1, 1024, 4096, 8, False).lanes == 128
    assert choose_tile(1, 16, 64, 8, False).lanes == 8
    assert choose_tile(1, 14336, 4096, 32, False) == VectorTile(256, 64)
    for m in (1, 8, 9, MOST_ROWS):
        for n, k, unit in ((16, 4096, 4), (1, 1, 4), (4096, 14336, 8), (1024, 4096, 8)):
            tile = choose_tile(m, n, k, unit, False)
            assert tile.threads % tile.lanes == 0 and tile.threads <= 256
            assert 16 * m * tile.threads // 4 + 1088 <= 16384
    assert gemv.served(MOST_ROWS, False, True, 1) and not gemv.served(MOST_ROWS + 1, False, True, 1)
