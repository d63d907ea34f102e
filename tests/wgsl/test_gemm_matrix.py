"""GEMMs on emulated tensor cores: the forms that they take, and which GEMMs run there."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.case_results import assert_case
from tests.wgsl.launches import same_bits_in_parts
from tests.wgsl.matrix_emulation import LANES
from tests.wgsl.small_tiles import SMALL_LARGE, SMALL_MEDIUM
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest import lora, loss
from wgrad.autograd.selftest.case import BF16, F16, F32, Case
from wgrad.autograd.selftest.gemm import gemm_case
from wgrad.autograd.selftest.matrix import decoded_cases, on_tile, product_cases, skinny_cases, trusted_cases
from wgrad.autograd.selftest.run import call_case, check_case, expected_outputs, judge, to_host
from wgrad.device.formats.frozen_weight import formats
from wgrad.device.formats.mxfp4 import Mxfp4Array
from wgrad.wgsl.gemm import gemm_matrix, gemm_matrix_lora, gemm_matrix_skinny, gemm_skinny
from wgrad.wgsl.gemm.gemm import matmul
from wgrad.wgsl.gemm.gemm_epilogue import Epilogue
from wgrad.wgsl.gemm.gemm_tile import SMALL
from wgrad.wgsl.moe import grouped
from wgrad.wgsl.runtime.compile import assemble, read_source


def few_cases() -> list[Case]:
    """Return cases of every form on one tile, and on the other those that depend on its layout.

    Compiling one takes seconds. Long reductions are shorter here, since a software driver runs at most 65,535
    iterations of loops per invocation.
    """
    long = on_tile(gemm_case("long inner", 72, 136, 1032, F16, trans_b=True, dtype=F32), "medium")
    medium = [c for c in product_cases() if "large tile" not in c.name and "x256/" not in c.name]
    medium = [long if "long inner" in c.name else c for c in medium]
    words = (
        "gemm_nn/plain",
        "gemm_tt/plain",
        "gemm_nt/epilogue",
        "gemm_nt/short",
        "gemm_tn/lowrank",
        "linear_nf4_backward/lowrank",
    )
    long_ones = ("4112x16x48", "8208x20x48", "64x64x4112", "270x208x16")
    skinny = [c for c in skinny_cases() if c.shape not in long_ones]
    shorter = [gemm_case("skinny", 64, 64, 1040, F16, F32, trans_b=True, dtype=F32)]
    skinny += [on_tile(case, "") for case in shorter + lora.cases_of_both(F16, ((270, (80,), 16),))]
    return [*medium, *skinny] + [
        c for c in product_cases() if "large tile" in c.name and "x256/" not in c.name and c.name.startswith(words)
    ]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("case", few_cases() + decoded_cases(), ids=lambda case: case.name)
def test_cases_run_on_tensor_cores_within_the_limits(
    matrix_device: Any, monkeypatch: pytest.MonkeyPatch, case: Case, lanes: int
) -> None:
    monkeypatch.setattr(matrix_device, "lanes", lanes)
    assert_case(case, matrix_device)
    assert "gemm" not in matrix_device.launched  # no product of these cases goes anywhere else
    if case.name.split("/")[1] == "skinny":
        assert matrix_device.launched <= {"gemm_matrix_skinny", "gemm_reduce"}
    if case.op == "lora_grads":
        assert matrix_device.launched == {"gemm_matrix_lora", "gemm_matrix_lora_reduce"}


def test_a_dry_run_plans_a_matmul_anew_where_its_limits_change(matrix_device: Any) -> None:
    """The check of a GPU compiles in advance what a dry run of its cases launches, on tiles that they force."""
    dry = matrix_device.dry_run()
    for tile in ("", "two"):
        call_case(on_tile(gemm_case("plain", 264, 136, 72, F16), tile), dry)
    assert len(dry.variants) == 2


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("op", ["lora_du", "lora_db", "lora_grads"])
def test_gradients_of_lora_run_in_parts(matrix_device: Any, monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    shader = "gemm_matrix_lora" if op == "lora_grads" else "gemm_matrix_skinny"
    case = next(case for case in skinny_cases() if case.op == op)
    same_bits_in_parts(case, matrix_device, monkeypatch, shader)
    assert_case(case, matrix_device)


@pytest.mark.parametrize("case", [c for c in product_cases() if "/stack lowrank" in c.name and "medium" in c.name][:1])
def test_a_tile_may_have_columns_of_several_weights(
    matrix_device: Any, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    """The LoRA term of each weight is in its own tile, with zeros in the columns of the others."""
    wide = gemm_matrix.MatrixTile(2, 2, 1, 2, 2)
    monkeypatch.setattr(gemm_matrix, "MEDIUM", wide)
    bounds = np.cumsum(case.inputs()["weight"].parts)[:-1]
    assert any(bounds % wide.n) and not any(bounds % SMALL_MEDIUM.n)
    assert_case(case, matrix_device)


@pytest.mark.usefixtures("small_tiles")
def test_a_weight_is_decoded_first_where_there_are_many_rows(matrix_device: Any) -> None:
    check_case(decoded_cases()[0], matrix_device)
    assert "quantize_decode" in matrix_device.launched


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", [c for c in loss.cases(F16) if "eights" in c.name], ids=lambda case: case.name)
def test_gradients_of_logits_run_on_tensor_cores(matrix_device: Any, case: Case) -> None:
    assert_case(case, matrix_device)
    assert ("gemm" in matrix_device.launched) == ("bias" in case.name)  # whose gradient is of float32 logits


@pytest.mark.usefixtures("small_tiles")
def test_small_gradients_of_logits_last(matrix_device: Any) -> None:
    """A thousand probabilities of 1e-8 would be zeros in float16 alone. Rows without a target are zeros, whatever the
    memory held before."""
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


@pytest.mark.usefixtures("small_tiles")
def test_mxfp4_is_exact_in_float16_with_any_scale(matrix_device: Any) -> None:
    """All codes, times powers of 2 beyond those of float16: multiplied by the identity. Larger ones are infinite."""
    exponents = np.arange(144, dtype=np.uint8)
    codes = np.tile(np.arange(0x10, 0x110, 0x11, dtype=np.int64).astype(np.uint8), (len(exponents), 1))
    codes[141:] = 0x11  # larger ones are infinite there, and with zeros of the identity NaN
    weight = Mxfp4Array(codes.reshape(-1), exponents, (len(exponents), 32))
    placed = weight.map_arrays(matrix_device.upload)
    found = matrix_device.download(matrix_device.linear_quantized(matrix_device.upload(np.eye(32, dtype=F16)), placed))
    assert "gemm_matrix" in matrix_device.launched
    exact = weight.rows(0, len(exponents), np.dtype(np.float64))
    assert len(np.unique(exact[140])) == 15
    np.testing.assert_array_equal(found, exact.T.astype(np.float16))


@pytest.mark.parametrize("case", [c for c in trusted_cases() if "mxfp4 taller" in c.name], ids=lambda case: case.name)
def test_the_check_of_tensor_cores_sees_that_denormal_numbers_are_lost(case: Case) -> None:
    """MXFP4's code 1 is one in float16, and would be 0."""
    inputs, device = case.inputs(), ReferenceDevice()
    expected, codes = expected_outputs(case, inputs), inputs["weight"].codes
    for ones, code in ((0x0F, 0x01), (0xF0, 0x10)):
        codes = np.where(codes & ones & 0x77 == code, codes & ~np.uint8(ones), codes)
    inputs["weight"] = replace(inputs["weight"], codes=codes)
    assert not judge(case, expected, to_host(case, device, call_case(case, device, inputs))).ok


def test_tensor_cores_serve_16_bit_operands_of_eight_rows_or_more() -> None:
    half, single = "float16", "float32"

    def served(a: str, b: str, out: str, *rest: Any) -> bool:
        return gemm_matrix.served((a, b), out, *rest)

    assert served(half, half, half, (128, 128, 128), False, False, 128)
    assert served(single, half, half, (128, 128, 128), False, True, 128)
    assert not served(single, half, single, (128, 128, 128), False, True, 128)  # float32 would be rounded
    assert not served(single, single, single, (128, 128, 128), False, False, 128)  # float32 stays float32
    assert served(half, half, half, (8, 128, 128), False, True, 128)
    assert not served(half, half, half, (7, 128, 128), False, True, 128)  # fewer rows are gemv.wgsl's
    assert served(half, half, half, (1, 128, 128), False, False, 128)  # which has none of these
    assert not served(half, half, half, (32, 128, 128), True, False, 32)
    assert not served(half, half, half, (128, 132, 128), False, False, 128)  # rows of B start anywhere
    assert not served(half, half, half, (128, 128, 132), False, True, 132)


def test_a_forced_tile_is_taken_where_a_skinny_product_would_be_served(matrix_device: Any, rng: Any) -> None:
    a, b = rng.standard_normal((64, 48)).astype(np.float16), rng.standard_normal((48, 16)).astype(np.float32)
    for forced in ({"tile": SMALL}, {"splits": 2}):
        matrix_device.launched.clear()
        out = matrix_device.empty((64, 16))
        matmul(matrix_device, matrix_device.upload(a), matrix_device.upload(b), Epilogue(out), **forced)
        np.testing.assert_allclose(matrix_device.download(out), a.astype(np.float32) @ b, atol=1e-4)
        assert matrix_device.launched == {"gemm", "gemm_reduce"} if "splits" in forced else {"gemm"}


@pytest.mark.parametrize("rank", [16, 32, 33, 64])
def test_a_skinny_matmul_without_workgroup_memory_takes_the_general_kernel(
    matrix_device: Any, monkeypatch: pytest.MonkeyPatch, rng: Any, rank: int
) -> None:
    """16 KiB, WebGPU's minimum, hold a tile for every rank, 8 KiB only for 16. Other ranks take the general kernel."""
    monkeypatch.setattr(matrix_device, "workgroup_bytes", 8192 if rank == 32 else 16384)
    a, b = rng.standard_normal((80, 48)).astype(np.float16), rng.standard_normal((48, rank)).astype(np.float32)
    got = matrix_device.gemm(matrix_device.upload(a), matrix_device.upload(b), dtype=np.float32)
    np.testing.assert_allclose(matrix_device.download(got), a.astype(np.float32) @ b, atol=1e-4)
    assert ("gemm_matrix_skinny" in matrix_device.launched) == (rank != 32)


def skinny_of(wide: Any, rank: int, along_rows: bool = False, parts: tuple[int, ...] = ()) -> Any:
    columns, part_rank = rank * max(1, len(parts) if along_rows else 1), rank if parts else 0
    return gemm_skinny.Skinny(wide, "float16", columns, rank, True, along_rows, parts=parts, part_rank=part_rank)


def test_skinny_tiles_fit_rank_sides_and_memory() -> None:
    def tile(m: int, n: int, k: int, trans_a: bool = False, memory: int = 49152) -> Any:
        types = ("float32", "float16") if trans_a else ("float16", "float32")
        skinny = gemm_skinny.find((m, n, k), *types, "float32", trans_a, False)
        return gemm_matrix_skinny.choose_tile(skinny, memory) if skinny is not None else None

    assert tile(128, 16, 96).depth == 256
    assert tile(128, 64, 96).depth == 64
    # A left operand of rank 64 for a result of 16 columns: its rank is what must fit.
    assert tile(64, 16, 128, trans_a=True, memory=32768).depth == 64
    assert tile(64, 16, 128, trans_a=True, memory=8192) is None
    assert tile(128, 65, 96) is None  # a rank beyond the largest
    assert tile(128, 16, 90) is None  # a side that is no multiple of 16


def test_large_skinny_matmuls_are_split_over_k() -> None:
    """Large GEMMs are split over the reduction, each part of a stack by its own length. Small ones are not, because the
    launch would take longer than it saves. No tile has columns of two parts."""
    module = gemm_matrix_skinny

    def of(*given: Any, **options: Any) -> tuple[Any, int]:
        product = skinny_of(*given, **options)
        tile = module.choose_tile(product, 49152)
        assert tile is not None
        return tile, module.splits_of(product, tile)[0]

    assert of((2048, 4096), 16) == (module._NARROW, 8)
    assert of((2048, 14336), 16, along_rows=True) == (module._NARROW, 1)  # 224 workgroups
    assert of((2048, 4096), 48) == (module._WIDE, 8)
    assert of((2048, 6144), 16, parts=(4096, 1024, 1024)) == (module._NARROW, 4)
    assert of((2048, 576), 16)[1] == of((2048, 3072), 16, along_rows=True)[1] == 1
    stack = of((8192, 6144), 48, along_rows=True, parts=(4096, 1984, 64))[0]
    assert stack.side == 64 and stack != module._WIDE
    whole = skinny_of((2048, 4096), 16, parts=(2048, 2048))
    assert module.splits_of(whole, module._NARROW)[0] > 1
    slices = replace(whole, part_rank=80, first_rank=64)
    assert module.splits_of(slices, module._NARROW)[0] == 1  # its sums lie between those of the other 64 ranks


@pytest.mark.parametrize("parts", [(4096, 1024, 1024), (14336, 14336), (576,), (64,)])
def test_gradients_of_lora_share_the_columns(parts: tuple[int, ...]) -> None:
    tile = gemm_matrix_lora.TILE
    for rows in (7, 2048, 8192):
        share, starts = gemm_matrix_lora.shares_of(tile, rows, parts)
        assert share % tile.columns == 0 and starts[0] == 0
        assert [end - start for start, end in pairwise(starts)] == [-(-part // share) for part in parts]
        groups, fewest = starts[-1] * -(-rows // tile.rows), sum(parts) // tile.columns
        assert groups >= min(180, fewest) and groups % 264 * 2 > min(groups, 264)  # the last wave is at least half full


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("columns", "rank", "dtype", "memory"),
    [
        (64, 6, "float16", 1),
        (64, 20, "float16", 1),
        (72, 8, "float16", 1),
        (64, 8, "float32", 1),
        (64, 8, "float16", 0),
    ],
)
def test_other_gradients_of_lora_are_two_matmuls(
    matrix_device: Any, monkeypatch: pytest.MonkeyPatch, columns: int, rank: int, dtype: str, memory: int
) -> None:
    monkeypatch.setattr(matrix_device, "workgroup_bytes", gemm_matrix_lora.TILE.workgroup_bytes - 1 + memory)
    rng = np.random.default_rng(0)
    dy = rng.standard_normal((32, columns)).astype(dtype)
    b, u = (rng.standard_normal((n, rank)).astype(np.float32) for n in (columns, 32))
    du, db = matrix_device.lora_grads(*map(matrix_device.upload, (dy, b, u)), alpha=2.0)
    assert "gemm_matrix_lora" not in matrix_device.launched
    wide = dy.astype(np.float64)
    np.testing.assert_allclose(matrix_device.download(du), 2 * wide @ b, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(matrix_device.download(db), wide.T @ u, rtol=1e-4, atol=1e-4)


def test_skinny_tiles_deal_evenly() -> None:
    """All invocations load equally many groups of eight of X for a block, and each subgroup has steps."""
    module = gemm_matrix_skinny
    for tile in (module._NARROW, module._WIDE, *module._WHOLE, *module._WHOLE_WIDE, *module._SMALL):
        shares, rest = divmod(tile.subgroups, tile.groups)
        assert rest == 0 and tile.depth % (16 * shares) == 0
        assert tile.side * tile.depth % (8 * 32 * tile.subgroups) == 0


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("along_rows", [False, True])
def test_a_skinny_matmul_may_take_one_launch(
    matrix_device: Any, monkeypatch: pytest.MonkeyPatch, ahead: int, along_rows: bool
) -> None:
    """Blocks alternate in one or two sets of registers. Their number is odd with a remainder, and the matrices do not
    fill the last tile."""
    tile = gemm_matrix_skinny.SkinnyTile(2, 1, 2, 32, ahead)
    monkeypatch.setattr(gemm_matrix_skinny, "_tiles", lambda product: (tile,))
    rng = np.random.default_rng(7)
    for k in (16, 144):  # half a block, and five of them
        a, b = rng.standard_normal((k, 48)).astype(np.float16), rng.standard_normal((k, 12)).astype(np.float32)
        x = a if along_rows else np.ascontiguousarray(a.T)
        exact = a.T.astype(np.float64) @ b
        if along_rows:
            got = matrix_device.gemm(matrix_device.upload(b), matrix_device.upload(x), trans_a=True, dtype=np.float32)
            exact = exact.T
        else:
            got = matrix_device.gemm(matrix_device.upload(x), matrix_device.upload(b), dtype=np.float32)
        np.testing.assert_allclose(matrix_device.download(got), exact, atol=2e-5)
    assert matrix_device.launched == {"gemm_matrix_skinny"}


@pytest.mark.parametrize(("k", "splits"), [(24, 1), (72, 2)])
def test_one_tile_of_k_prefetches_nothing(matrix_device: Any, k: int, splits: int) -> None:
    """There is no tile to prefetch, in the whole GEMM or in its last part."""
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((72, k), (k, 64)))
    out = matrix_device.empty((72, 64))
    operands = matrix_device.upload(a), matrix_device.upload(b)
    matmul(matrix_device, *operands, Epilogue(out), tile=SMALL_LARGE, splits=splits)
    np.testing.assert_allclose(matrix_device.download(out), a.astype(float) @ b.astype(float), atol=1e-4)


@pytest.mark.parametrize(("tile", "lanes"), [(SMALL_LARGE, 32), (gemm_matrix.MatrixTile(1, 1, 2, 1, 2), 64)])
@pytest.mark.parametrize("shares_memory", [False, True])
def test_what_is_added_is_read_ahead(
    matrix_device: Any, monkeypatch: pytest.MonkeyPatch, tile: gemm_matrix.MatrixTile, lanes: int, shares_memory: bool
) -> None:
    """It is prefetched through a writable binding. If an operand is in the same memory, which WebGPU refuses, it is
    read when storing. Sizes divide nothing, and rows have other columns before and after them."""
    monkeypatch.setattr(matrix_device, "lanes", lanes)
    m, n, k, column, ldc = 72, 88, 40, 8, 104
    rng = np.random.default_rng(7)
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((m, k), (k, n)))
    numbers = rng.standard_normal((m, ldc)).astype(np.float16)
    both = matrix_device.upload(np.concatenate([a.ravel(), np.zeros(-a.size % 128, np.float16), numbers.ravel()]))
    given = matrix_device.view(both, (m, k), 0)
    added = matrix_device.view(both, (m, ldc), both.size - numbers.size)
    if not shares_memory:
        given = matrix_device.upload(a)
    found, launch, out = [], matrix_device.launch, matrix_device.zeros((m, ldc), np.float32)

    def launched(*given: Any, **options: Any) -> None:
        found.append(given[4]["RESIDUAL_AHEAD"])
        launch(*given, **options)

    monkeypatch.setattr(matrix_device, "launch", launched)
    end = Epilogue(out, 0.5, residual=added, column=column, ldc=ldc)
    matmul(matrix_device, given, matrix_device.upload(b), end, tile=tile, splits=1)
    exact = np.zeros((m, ldc))
    exact[:, column : column + n] = 0.5 * (a.astype(float) @ b.astype(float)) + numbers[:, column : column + n]
    np.testing.assert_allclose(matrix_device.download(out), exact, atol=1e-4)
    assert found == [not shares_memory]


def test_rows_of_tiles_advance_in_groups(matrix_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine rows of tiles: first eight and then one advance along N together."""
    monkeypatch.setattr(gemm_matrix, "MANY_COLUMNS", 3)
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((2, 264, 40), (2, 40, 88)))
    out = matrix_device.empty((2, 264, 88))
    operands = matrix_device.upload(a), matrix_device.upload(b)
    matmul(matrix_device, *operands, Epilogue(out), tile=SMALL_LARGE, splits=1)
    np.testing.assert_allclose(matrix_device.download(out), a.astype(float) @ b.astype(float), atol=1e-4)


def test_what_is_only_faster_is_used(matrix_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results do not show it: some tiles prefetch two tiles ahead, and wide outputs are computed in groups of rows."""
    found: list[tuple[bool, bool]] = []
    tables: list[bool] = []

    def noted(*given: Any, **_: Any) -> None:
        found.append((given[4]["AHEAD"], given[4]["GROUPED"]))
        tables.append(given[4].get("TABLE", False))

    monkeypatch.setattr(matrix_device, "launch", noted)
    a = matrix_device.empty((64, 64), np.dtype(np.float16))
    weight = ReferenceDevice().quantize(np.ones((64, 64), np.float32)).map_arrays(matrix_device.upload)

    def of(b: Any, tile: gemm_matrix.MatrixTile) -> tuple[bool, bool]:
        matmul(matrix_device, a, b, Epilogue(matrix_device.empty((64, 64))), tile=tile, splits=1)
        return found.pop()

    large = gemm_matrix.MatrixTile(2, 1, 1, 2, 1, ahead=gemm_matrix.LARGE.ahead)
    assert of(a, large) == (True, False)
    assert of(a, gemm_matrix.MEDIUM) == (False, False)
    assert all(of(weight, tile) == (True, False) for tile in gemm_matrix.WEIGHT_TILES[8])
    assert tables[-1] and all(tile.scales_inside for tile in gemm_matrix.WEIGHT_TILES[8])
    assert of(weight, gemm_matrix.NARROW) == (False, False) and not tables[-1]  # of one tile of K
    assert gemm_matrix.NARROW.ahead
    assert 49152 // (gemm_matrix.NARROW.workgroup_bytes(False, True) + gemm_matrix._LEVELS) == 3  # so many run at once
    monkeypatch.setattr(gemm_matrix, "MANY_COLUMNS", 64 // large.n)
    assert of(a, large) == (True, True)


@pytest.mark.parametrize(("name", "unit"), [("nf4", 8), ("q5_k", 16)])
def test_a_weight_is_decoded_by_as_few_tiles_of_rows_as_hold_them(name: str, unit: int) -> None:
    weight = formats()[name].quantize(np.zeros((1, 256), np.float32))

    def of(m: int, n: int, k: int, memory: int = 49152, lanes: int = 32) -> tuple[int, int, int]:
        tile, splits = gemm_matrix.choose_weight_tile(m, n, k, weight, memory, lanes)
        return tile.m, tile.n, splits

    assert {m: of(m, 4096, 4096) for m in (16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512)} == {
        16: (16, 64, 6),
        **dict.fromkeys((17, 32), (32, 64, 4)),
        **dict.fromkeys((33, 64), (64, 64, 4)),
        **dict.fromkeys((65, 128), (128, 128, 4)),
        **dict.fromkeys((129, 256), (256, 128, 4)),
        **dict.fromkeys((257, 512), (256, 128, 2)),
    }
    for m, tile in ((17, gemm_matrix.WEIGHT_TILES[8][0]), (65, gemm_matrix.WEIGHT_TILES[8][1])):
        assert gemm_matrix.choose_weight_tile(m, 4096, 4096, weight, 49152, 64)[0] == tile
    assert of(128, 4096, 4096, memory=32768)[:2] == (128, 128 if unit == 8 else 64) and of(64, 28672, 4096)[2] == 1
    assert of(256, 14336, 4096) == (256, 128, 1) and of(256, 4096, 576) == (256, 128, 1)
    assert of(256, 4096, 4096, memory=32768)[:2] == (128, 128)
    for tile in (gemm_matrix.NARROW, *gemm_matrix.WEIGHT_TILES[unit], *gemm_matrix.FEW_ROWS_TILES):
        assert tile.most_workgroup_bytes <= 49152
        assert tile.n * tile.k % (gemm_matrix.unit_of(weight, tile.m, tile=tile) * tile.threads) == 0


def test_workgroups_of_a_narrow_product_fill_their_waves() -> None:
    """396 workgroups run at once, so 4096 columns have 64 times six splits."""
    of = partial(gemm_matrix._wave_splits, gemm_matrix.NARROW)
    for splits, shapes in {  # as was fastest on an H200
        1: [(128256, 4096), (64, 100)],
        3: [(14336, 4096), (8192, 2048)],
        4: [(6144, 4096)],
        6: [(4096, 4096), (4096, 14336)],
        12: [(2048, 8192)],
    }.items():
        assert {shape: of(16, *shape) for shape in shapes} == dict.fromkeys(shapes, splits)
    assert of(16, 2048, 2048) == of(33, 1024, 2048) == 4  # of 512 of K at least


def test_a_unit_of_a_weight_follows_the_rows_and_its_format() -> None:
    def of(m: int, width: int = 256) -> dict[str, int]:
        weights = {name: kind.quantize(np.zeros((1, width), np.float32)) for name, kind in formats().items()}
        return {name: gemm_matrix.unit_of(weight, m) for name, weight in weights.items()}

    assert of(17) == {name: 8 if name == "nf4" else 16 for name in formats()}
    few = gemm_matrix.FEW_ROWS_TILES[0]
    assert gemm_matrix.unit_of(formats()["nf4"].quantize(np.zeros((1, 256), np.float32)), 17, tile=few) == 32
    assert of(16) == of(8) == {name: 16 if name == "q8_0" else 32 for name in formats()}
    nf4 = [formats()["nf4"].quantize(np.zeros((1, width), np.float32)) for width in (264, 272, 288)]
    assert [gemm_matrix.unit_of(weight, 16) for weight in nf4] == [8, 16, 32]


def declared_bytes(text: str) -> int:
    """Return the bytes of variables in workgroup memory."""
    numbers: dict[str, int] = {}

    def value(expression: str) -> int:
        return int(eval(re.sub(r"(\d)u\b", r"\1", expression).replace("/", "//"), {}, numbers))

    for name, expression in re.findall(r"const (\w+)(?:: u32)? = ([^;]+);", text):
        with suppress(NameError, SyntaxError):  # of another type
            numbers[name] = value(expression)
    element = {"Eight": 16, "vec4<f32>": 16, "f32": 4}
    found = re.findall(r"var<workgroup> \w+: array<([\w<>]+), ([^>]+)>;", text)
    assert len(found) == text.count("var<workgroup>")
    return sum(element[kind] * value(count) for kind, count in found)


@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("format, nested", [("nf4", True), ("nf4", False), ("q8_0", False)])
def test_workgroup_memory_is_what_the_shader_declares(
    matrix_device: Any, monkeypatch: pytest.MonkeyPatch, format: str, nested: bool, trans_b: bool
) -> None:
    texts: list[str] = []

    def noted(shader: str, *given: Any, **_: Any) -> None:
        texts.append(assemble(read_source(f"{shader}.wgsl", given[3]), given[3]))

    monkeypatch.setattr(matrix_device, "launch", noted)
    a, out = matrix_device.empty((64, 256), np.float16), matrix_device.empty((64, 256), np.float16)
    weight = formats()[format].quantize(np.ones((256, 256), np.float32), 64, nested).map_arrays(matrix_device.upload)

    def check(tile: gemm_matrix.MatrixTile) -> None:
        tables = 64 * (format == "nf4" and not tile.shuffles) + 1024 * (nested and tile.scales_inside)
        assert declared_bytes(texts[-1]) == tile.workgroup_bytes(False, trans_b) + tables <= tile.most_workgroup_bytes

    tiles = (gemm_matrix.NARROW, *gemm_matrix.WEIGHT_TILES[16], *gemm_matrix.FEW_ROWS_TILES[:: 1 if trans_b else 3])
    for tile in (*tiles, gemm_matrix.LARGE, gemm_matrix.MEDIUM):
        matmul(matrix_device, a, weight, Epilogue(out), trans_b=trans_b, tile=tile, splits=1)
        check(tile)
    multiply = matrix_device.grouped_linear if trans_b else matrix_device.grouped_linear_backward
    rows, start = matrix_device.empty((64, 256 if trans_b else 128), np.float16), matrix_device.empty((3,), np.int32)
    for tile in (grouped._WEIGHTS_ABOUT, grouped._ARRAYS_ABOUT_FORWARD):  # with rows in addition
        monkeypatch.setattr(grouped, "_matrix_tile", lambda *_, tile=tile: tile)
        multiply(rows, weight, start)
        check(tile)


def test_tiles_fit_the_device() -> None:
    assert gemm_matrix.choose_tile(8192, 8192, 64, 1, 49152)[0] is gemm_matrix.LARGE
    assert gemm_matrix.choose_tile(8192, 8192, 64, 1, 32768)[0] is gemm_matrix.MEDIUM
    assert gemm_matrix.MEDIUM.most_workgroup_bytes <= 32768
    assert gemm_matrix.choose_tile(128, 128, 4096, 1, 49152) == (gemm_matrix.MEDIUM, 8)


def test_a_right_operand_that_is_rounded_has_two_tiles_at_once(
    matrix_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.setattr(matrix_device, "workgroup_bytes", 49152)
    monkeypatch.setattr(matrix_device, "launch", lambda *a, **_: found.append(a[4]["SG_N"] * 16 * a[4]["SUB_G"]))
    a, out = matrix_device.empty((2048, 64), np.float16), matrix_device.empty((2048, 4096))
    for dtype, trans_b, columns in ((BF16, True, 128), (F16, True, 256), (BF16, False, 128)):
        b = matrix_device.empty((4096, 64) if trans_b else (64, 4096), dtype)
        matmul(matrix_device, a, b, Epilogue(out), trans_b=trans_b)
        assert found.pop() == columns
    assert 2 * gemm_matrix.TWO_AT_ONCE.workgroup_bytes(False, True) <= 49152
    assert 2 * gemm_matrix.OF_HEADS.workgroup_bytes(False, True) <= 49152
    monkeypatch.setattr(matrix_device, "matrix_tile", "large")  # the self-test's
    matmul(matrix_device, a, matrix_device.empty((4096, 64), BF16), Epilogue(out), trans_b=True)
    assert found == [256]


def test_long_reductions_fill_the_gpu_with_parts_of_large_tiles() -> None:
    """For the input's gradient of a head of 128,256 rows, with 256 rows of the 1B or the 8B."""
    assert gemm_matrix.choose_tile(256, 2048, 128256, 1, 49152) == (gemm_matrix.LARGE, 8)
    assert gemm_matrix.choose_tile(256, 4096, 128256, 1, 49152) == (gemm_matrix.LARGE, 4)
    assert gemm_matrix.choose_tile(2048, 1024, 4096, 1, 49152)[0] is gemm_matrix.MEDIUM  # parts would be short
    assert gemm_matrix.choose_tile(256, 256, 128256, 1, 49152)[0] is gemm_matrix.MEDIUM  # too few
    assert gemm_matrix.choose_tile(256, 2048, 128256, 2, 49152)[0] is gemm_matrix.MEDIUM  # a batch has no parts
    assert gemm_matrix.choose_tile(256, 2048, 128256, 1, 49152, "medium") == (gemm_matrix.MEDIUM, 1)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.usefixtures("small_tiles")
def test_a_matmul_in_several_dispatches_has_the_same_bits(
    matrix_device: Any, monkeypatch: pytest.MonkeyPatch, grouped: bool
) -> None:
    if grouped:
        monkeypatch.setattr(gemm_matrix, "MANY_COLUMNS", 2)
    case = next(case for case in product_cases() if case.name.startswith("gemm_nt/epilogue") and "medium" in case.name)
    same_bits_in_parts(case, matrix_device, monkeypatch, "gemm_matrix")
