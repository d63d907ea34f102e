"""Products on matrix units, on an emulation of them: the forms that they serve, and which products go there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest import loss
from wgrad.autograd.selftest.case import F16, Case
from wgrad.autograd.selftest.matrix import decoded_cases, product_cases, skinny_cases
from wgrad.autograd.selftest.run import check_case
from wgrad.wgsl import gemm_matrix, gemm_matrix_skinny, gemm_skinny
from wgrad.wgsl.gemm import SMALL, product

# The same code in sizes that a software driver compiles soon: subgroups side by side, and groups of columns.
SMALL_LARGE = gemm_matrix.MatrixTile(2, 1, 1, 2, 1, ahead=True)
SMALL_MEDIUM = gemm_matrix.MatrixTile(1, 2, 1, 1, 1)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_matrix, "LARGE", SMALL_LARGE)
    monkeypatch.setattr(gemm_matrix, "MEDIUM", SMALL_MEDIUM)
    monkeypatch.setattr(gemm_matrix_skinny, "_TILES", ((2, 16),))
    monkeypatch.setattr(gemm_matrix_skinny, "_WANTED_GROUPS", 3)  # so that sides of 208 are long


def few_cases() -> list[Case]:
    """Every form on one tile, and on the other what hangs on the tile's layout. A compilation takes seconds."""
    medium = [c for c in product_cases() if "large tile" not in c.name and "x256/" not in c.name]
    words = (
        "gemm_nn/plain",
        "gemm_tt/plain",
        "gemm_nt/epilogue",
        "gemm_nt/short",
        "gemm_tn/lowrank",
        "linear_nf4_backward/lowrank",
    )
    skinny = [c for c in skinny_cases() if max(map(int, c.shape.split("x"))) < 4112 or c.shape == "64x64x4112"]
    return [*medium, *skinny] + [
        c for c in product_cases() if "large tile" in c.name and "x256/" not in c.name and c.name.startswith(words)
    ]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", few_cases() + decoded_cases(), ids=lambda case: case.name)
def test_case(matrix_device: Any, case: Case) -> None:
    result = check_case(case, matrix_device)
    assert result.ok, f"{result.output} is off by {result.error:.3g}, allowed {result.limit:.3g}"
    assert "gemm" not in matrix_device.launched  # no product of these cases goes anywhere else
    assert not case.name.split("/")[1] == "skinny" or matrix_device.launched == {"gemm_matrix_skinny"}


@pytest.mark.parametrize("case", [c for c in product_cases() if "/stack lowrank" in c.name and "medium" in c.name][:1])
def test_a_tile_with_columns_of_several_weights(
    matrix_device: Any, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    """The LoRA term of each stands in a tile of its own, with zeros for the columns of the others."""
    wide = gemm_matrix.MatrixTile(1, 2, 1, 2, 2)
    monkeypatch.setattr(gemm_matrix, "MEDIUM", wide)
    bounds = np.cumsum(case.inputs()["weight"].parts)[:-1]
    assert any(bounds % wide.n) and not any(bounds % SMALL_MEDIUM.n)
    result = check_case(case, matrix_device)
    assert result.ok, f"{result.output} is off by {result.error:.3g}, allowed {result.limit:.3g}"


@pytest.mark.usefixtures("small_tiles")
def test_a_weight_is_decoded_first_where_there_are_many_rows(matrix_device: Any) -> None:
    check_case(decoded_cases()[0], matrix_device)
    assert "quantize_decode" in matrix_device.launched


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", [c for c in loss.cases(F16) if "eights" in c.name], ids=lambda case: case.name)
def test_gradients_of_logits_on_matrix_units(matrix_device: Any, case: Case) -> None:
    result = check_case(case, matrix_device)
    assert result.ok, f"{result.output} is off by {result.error:.3g}, allowed {result.limit:.3g}"
    assert ("gemm" in matrix_device.launched) == ("bias" in case.name)  # whose gradient is of float32 logits


@pytest.mark.usefixtures("small_tiles")
def test_small_gradients_of_logits_last(matrix_device: Any) -> None:
    """Probabilities of 1e-8, a thousand of them: float16 alone would have zeros. And rows without a target are zeros,
    whatever stood in that memory before."""
    rows, width, vocab = 64, 64, 1024
    x, weight = np.zeros((rows, width), np.float16), np.full((vocab, width), 0.5, np.float16)
    x[:, 0] = 18.42
    weight[:, 0] = -1.0
    weight[7] = 0.0
    targets = np.full(rows, 7, np.int32)
    targets[::3] = -100
    given = [matrix_device.upload(array) for array in (x, weight, targets)]
    matrix_device.upload(np.full((rows, vocab), np.nan, np.float16))  # its memory is free again
    found = matrix_device.download(matrix_device.linear_cross_entropy(*given, need_dx=True, need_dweight=False)[1])
    cpu = ReferenceDevice()
    wide = [array.astype(np.float64) if array.dtype == np.float16 else array for array in (x, weight, targets)]
    exact = cpu.linear_cross_entropy(*wide, need_dx=True, need_dweight=False)[1]
    assert not found[::3].any()
    np.testing.assert_allclose(found, exact, rtol=1e-2)


def test_which_products_are_served(matrix_device: Any) -> None:
    half, single = (matrix_device.empty((128, 128), t) for t in (np.float16, np.float32))
    served = gemm_matrix.served
    assert served(half, half, half, (128, 128, 128), False, False, 128)
    assert served(single, half, half, (128, 128, 128), False, True, 128)
    assert not served(single, half, single, (128, 128, 128), False, True, 128)  # float32 would be rounded
    assert not served(single, single, single, (128, 128, 128), False, False, 128)  # float32 stays float32
    assert served(half, half, half, (8, 128, 128), False, False, 128)
    assert not served(half, half, half, (7, 128, 128), False, False, 128)  # too few rows
    assert not served(half, half, half, (32, 128, 128), True, False, 32)
    assert not served(half, half, half, (128, 132, 128), False, False, 128)  # rows of B start anywhere
    assert not served(half, half, half, (128, 128, 132), False, True, 132)


def test_a_forced_tile_is_taken_where_a_skinny_product_would_be_served(matrix_device: Any, rng: Any) -> None:
    a, b = rng.standard_normal((64, 48)).astype(np.float16), rng.standard_normal((48, 16)).astype(np.float32)
    for forced in ({"tile": SMALL}, {"splits": 2}):
        matrix_device.launched.clear()
        out = matrix_device.empty((64, 16))
        product(matrix_device, matrix_device.upload(a), matrix_device.upload(b), out, (64, 16, 48), **forced)
        np.testing.assert_allclose(matrix_device.download(out), a.astype(np.float32) @ b, atol=1e-4)
        assert matrix_device.launched == {"gemm", "gemm_reduce"} if "splits" in forced else {"gemm"}


@pytest.mark.parametrize("rank", [16, 32, 33, 64])
def test_a_skinny_product_on_little_workgroup_memory(
    matrix_device: Any, monkeypatch: pytest.MonkeyPatch, rng: Any, rank: int
) -> None:
    """16 KiB, the least of WebGPU, hold a tile for every rank; 8 KiB for 16: others go where other products go."""
    monkeypatch.setattr(matrix_device, "workgroup_bytes", 8192 if rank == 32 else 16384)
    a, b = rng.standard_normal((80, 48)).astype(np.float16), rng.standard_normal((48, rank)).astype(np.float32)
    got = matrix_device.gemm(matrix_device.upload(a), matrix_device.upload(b), dtype=np.float32)
    np.testing.assert_allclose(matrix_device.download(got), a.astype(np.float32) @ b, atol=1e-4)
    assert ("gemm_matrix_skinny" in matrix_device.launched) == (rank != 32)


def test_which_skinny_products_are_served(matrix_device: Any) -> None:
    def tile(a: Any, b: Any, m: int, n: int, k: int, trans_a: bool = False, memory: int = 49152) -> Any:
        wide, narrow = matrix_device.empty(a, np.float16), matrix_device.empty(b, np.float32)
        operands = (narrow, wide) if trans_a else (wide, narrow)
        skinny = gemm_skinny.find(*operands, matrix_device.empty((m, n)), (m, n, k), trans_a, False)
        return gemm_matrix_skinny.choose_tile(skinny, memory) if skinny is not None else None

    assert tile((128, 96), (96, 16), 128, 16, 96) == (8, 32)
    assert tile((128, 96), (96, 64), 128, 64, 96) == (4, 32)
    # A left operand of rank 64 for a result of 16 columns: its rank is what must fit.
    assert tile((128, 16), (128, 64), 64, 16, 128, trans_a=True, memory=32768) == (4, 16)
    assert tile((128, 16), (128, 64), 64, 16, 128, trans_a=True, memory=8192) is None
    assert tile((128, 96), (96, 65), 128, 65, 96) is None  # a rank beyond the largest
    assert tile((128, 90), (90, 16), 128, 16, 90) is None  # a side that is no multiple of 16


@pytest.mark.parametrize(("k", "splits"), [(24, 1), (72, 2)])
def test_one_tile_of_k(matrix_device: Any, k: int, splits: int) -> None:
    """There is none to read ahead, in the whole product or in its last part."""
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((72, k), (k, 64)))
    out = matrix_device.empty((72, 64))
    operands = matrix_device.upload(a), matrix_device.upload(b)
    product(matrix_device, *operands, out, (72, 64, k), tile=SMALL_LARGE, splits=splits)
    np.testing.assert_allclose(matrix_device.download(out), a.astype(float) @ b.astype(float), atol=1e-4)


def test_rows_of_tiles_in_groups(matrix_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine rows of tiles, of which eight and then one go along N together."""
    monkeypatch.setattr(gemm_matrix, "MANY_COLUMNS", 3)
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((2, 264, 40), (2, 40, 88)))
    out = matrix_device.empty((2, 264, 88))
    operands = matrix_device.upload(a), matrix_device.upload(b)
    product(matrix_device, *operands, out, (264, 88, 40), batch=2, tile=SMALL_LARGE, splits=1)
    np.testing.assert_allclose(matrix_device.download(out), a.astype(float) @ b.astype(float), atol=1e-4)


def test_what_is_only_faster_is_used(matrix_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No result shows it: arrays are read two tiles ahead by tiles that are for it, and from so many tiles side by side
    on rows of them go in groups."""
    found: list[tuple[bool, bool]] = []
    monkeypatch.setattr(matrix_device, "launch", lambda *a, **_: found.append((a[4]["AHEAD"], a[4]["GROUPED"])))
    a = matrix_device.empty((64, 64), np.dtype(np.float16))
    weight = ReferenceDevice().quantize(np.ones((64, 64), np.float32)).map_arrays(matrix_device.upload)

    def of(b: Any, tile: gemm_matrix.MatrixTile) -> tuple[bool, bool]:
        product(matrix_device, a, b, matrix_device.empty((64, 64)), (64, 64, 64), tile=tile, splits=1)
        return found.pop()

    large = gemm_matrix.MatrixTile(2, 1, 1, 2, 1, ahead=gemm_matrix.LARGE.ahead)
    assert of(a, large) == (True, False)
    assert of(a, gemm_matrix.MEDIUM) == of(weight, large) == (False, False)
    monkeypatch.setattr(gemm_matrix, "MANY_COLUMNS", 64 // large.n)
    assert of(a, large) == (True, True)


def test_tiles_fit_the_device() -> None:
    assert gemm_matrix.choose_tile(8192, 8192, 64, 1, 49152)[0] is gemm_matrix.LARGE
    assert gemm_matrix.choose_tile(8192, 8192, 64, 1, 32768)[0] is gemm_matrix.MEDIUM
    assert gemm_matrix.MEDIUM.most_workgroup_bytes <= 32768
    assert gemm_matrix.choose_tile(128, 128, 4096, 1, 49152) == (gemm_matrix.MEDIUM, 8)
