"""Mixture of experts on wgpu: the bounds of its launches, and rows of few tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.case_results import assert_case
from tests.wgsl.launches import launched, same_bits_in_parts
from tests.wgsl.matrix_emulation import LANES
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest.case import F16, F32, Case, Inputs
from wgrad.autograd.selftest.experts import cases, grouped_case
from wgrad.autograd.selftest.matrix import expert_cases, expert_rank_cases
from wgrad.wgsl.formats.formats import WeightForm
from wgrad.wgsl.gemm import gemm_matrix
from wgrad.wgsl.gemm.gemm_matrix import MatrixTile
from wgrad.wgsl.gemm.gemm_tile import FEW_REGISTERS, FLAT_SKINNY, MAIN, SMALL, TALL_SKINNY
from wgrad.wgsl.gemm.gemv import VectorTile
from wgrad.wgsl.gemm.plan import Gemm, Limits
from wgrad.wgsl.moe import grouped

CORES = Limits(48 << 10, 1 << 30, False, True)  # of an NVIDIA GPU with tensor cores
NF4, MXFP4 = (WeightForm(format, 8, (128 * 1536, 2048)) for format in ("nf4", "mxfp4"))
NESTED = replace(NF4, nested=True)


@pytest.mark.parametrize(("direction", "shader"), [("forward", "gemm"), ("weight_grad", "moe_weight_grad")])
def test_launches_in_parts_have_the_same_bits(
    direction: str, shader: str, wgpu_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = grouped_case(direction, "parts", (131, 5, 2, 136, 72), F32, gather=True)
    same_bits_in_parts(case, wgpu_device, monkeypatch, shader)


ON_TENSOR_CORES = [case for case in cases(F16) if "eights" in case.name]
ON_FEWER_ROWS = [case for case in expert_cases() if " x " in case.name]


@pytest.mark.parametrize("case", ON_TENSOR_CORES, ids=lambda case: case.name)
def test_cases_run_on_tensor_cores_within_the_limits(
    case: Case, matrix_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of 32 rows: of the last ones of an expert there are up to 16, and more; or up to 16 in addition to the 32.
    small = MatrixTile(1, 2, 2, 1, 1, shorter=(1,), taller=1, decode_first=True)
    narrow = MatrixTile(1, 2, 1, 1, 1, 64, ahead=True)
    for name in ("_OF_ARRAYS", "_FORWARD_FEWER"):
        monkeypatch.setattr(grouped, name, small)
    monkeypatch.setattr(grouped, "_BACKWARD", MatrixTile(1, 2, 3, 1, 1, shorter=(1, 2)))
    for name in ("_HIGH_ROWS", "_HIGH_ROWS_OF_ARRAYS", "_LEAST_K"):
        monkeypatch.setattr(grouped, name, 0)
    monkeypatch.setattr(grouped, "_FEWER", ())
    monkeypatch.setattr(gemm_matrix, "NARROW", narrow)
    assert_case(case, matrix_device)
    assert "gemm_matrix" in matrix_device.launched and "gemm" not in matrix_device.launched


@pytest.mark.parametrize("double", [False, True])
def test_the_form_of_a_weight_says_whether_scales_are_quantized(double: bool) -> None:
    weight = ReferenceDevice().quantize(np.ones((64, 64), np.float32), 64, double=double)
    assert WeightForm.of(weight).nested == double


def test_a_tile_may_hold_all_rows_of_an_expert(matrix_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As wide as the tile of 192 columns, with code for rows of which an invocation would load half an eight."""
    monkeypatch.setattr(grouped, "_WHOLE", MatrixTile(1, 4, 2, 3, 1, ahead=True, shorter=(1,)))
    monkeypatch.setattr(grouped, "_WHOLE_ROWS", range(48))
    for name in ("_HIGH_ROWS", "_LEAST_K"):
        monkeypatch.setattr(grouped, name, 0)
    monkeypatch.setattr(grouped, "_FEWER", ())
    assert_case(grouped_case("backward", "whole", (61, 5, 2, 64, 224), F16, format="mxfp4"), matrix_device)
    assert "gemm_matrix" in matrix_device.launched


# A tile of 64 or 32 rows with up to so many blocks of 16 more, and the rows of each expert: fewer than may be in
# addition, at most as many as that, one more, and several tiles.
TALLER = {
    "forward": (MatrixTile(2, 2, 2, 2, 1, ahead=True, taller=2), (9, 96, 0, 97, 144)),
    "backward": (MatrixTile(1, 2, 2, 1, 1, 64, taller=1), (9, 33, 0, 80, 49, 15)),
}


@pytest.mark.parametrize(
    ("direction", "lanes", "format"),
    [
        ("forward", 64, ""),
        pytest.param("forward", 32, "nf4", marks=pytest.mark.all),
        pytest.param("backward", 16, "", marks=pytest.mark.all),
        pytest.param("backward", 8, "", marks=pytest.mark.all),
    ],
)
def test_last_rows_are_multiplied_with_the_tile_before(
    direction: str, lanes: int, format: str, matrix_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile, rows = TALLER[direction]
    sizes = (sum(rows) // 2, len(rows), 2, 72, 72)
    case = grouped_case(direction, "taller", sizes, F16, gather=direction == "forward", format=format, weight=F16)

    def build(rng: np.random.Generator) -> Inputs:
        return {**case.build(rng), "start": np.cumsum((0, *rows), dtype=np.int32)}

    monkeypatch.setattr(matrix_device, "lanes", lanes)
    monkeypatch.setattr(grouped, "_matrix_tile", lambda *_: tile)
    monkeypatch.setattr(grouped, "_unit_of", lambda *_: 8)
    assert_case(replace(case, build=build), matrix_device)
    assert "gemm_matrix" in matrix_device.launched


@pytest.mark.parametrize("case", ON_FEWER_ROWS, ids=lambda case: case.name)
def test_fewer_rows_run_on_tensor_cores(case: Case, matrix_device: Any) -> None:
    assert_case(case, matrix_device)
    assert "gemm_matrix" in matrix_device.launched and "gemm" not in matrix_device.launched


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_many_rows_are_multiplied_with_a_dequantized_weight(
    direction: str, matrix_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped, "_DEQUANTIZE_ROWS", 24)  # of an expert
    monkeypatch.setattr(grouped, "_LEAST_K", 64)
    for name in ("LARGE", "MEDIUM", "NARROW"):
        monkeypatch.setattr(gemm_matrix, name, MatrixTile(1, 2, 1, 1, 1))
    monkeypatch.setattr(gemm_matrix, "WEIGHT_TILES", dict.fromkeys((8, 16), (MatrixTile(1, 2, 1, 1, 1),) * 2))
    forms, launch = set[object](), matrix_device.launch

    def noted(shader: str, arrays: Any, params: Any, groups: Any, constants: Any = None, **options: Any) -> None:
        forms.add((shader, constants and constants.get("IN_BLOCKS")))
        launch(shader, arrays, params, groups, constants, **options)

    monkeypatch.setattr(matrix_device, "launch", noted)
    for tokens, width, first, in_blocks in ((61, 72, True, False), (61, 80, True, True), (60, 80, False, False)):
        forms.clear()
        case = grouped_case(direction, "rows", (tokens, 5, 2, width, 64), F16, format="nf4", double=True)
        assert_case(case, matrix_device)
        assert ("gemm_matrix", in_blocks) in forms and (("quantize_decode", in_blocks) in forms) == first


# One with more columns than the largest rank, which loads nothing ahead.
_BEYOND = grouped_case("forward", "beyond ranks", (70, 3, 2, 136, 40), F32, add=True, dtype=F16)
RANKS = [(case, 32) for case in (*expert_rank_cases(), _BEYOND)] + [
    pytest.param(case, lanes, marks=pytest.mark.all) for case in expert_rank_cases() for lanes in LANES if lanes != 32
]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("case", "lanes"), RANKS, ids=lambda value: getattr(value, "name", str(value)))
def test_lora_of_experts_runs_on_tensor_cores(
    case: Case, lanes: int, matrix_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The added term is read ahead where K is the rank. With few experts, workgroups share an expert's rows."""
    monkeypatch.setattr(matrix_device, "lanes", lanes)
    monkeypatch.setattr(gemm_matrix, "OF_RANKS", MatrixTile(1, 2, 2, 1, 1, 16))
    ahead, launch = [], matrix_device.launch

    def noted(shader: str, arrays: Any, params: Any, groups: Any, constants: Any, **options: Any) -> None:
        ahead.append(constants.get("RESIDUAL_AHEAD"))
        launch(shader, arrays, params, groups, constants, **options)

    monkeypatch.setattr(matrix_device, "launch", noted)
    assert_case(case, matrix_device)
    narrow = case.op == "grouped_weight_grad" or case.dtype == "float16"
    shared = {"gemm_reduce"} if case.shape.startswith("520x2x") else set()
    assert matrix_device.launched == ({"gemm_matrix_skinny"} | shared if narrow else {"gemm_matrix"})
    assert any(ahead) == (case.op == "grouped_linear" and not narrow and case is not _BEYOND)


@pytest.mark.parametrize(("n", "k", "rows"), [(16, 72, 16), (16, 76, 40), (6, 72, 40), (68, 72, 40)])
def test_other_ranks_of_experts_take_the_general_kernels(n: int, k: int, rows: int, matrix_device: Any) -> None:
    """Rows of x that are no multiple of 16 bytes, ranks beyond the largest or, of a gradient, not read four at once;
    few rows of an expert."""
    case = grouped_case("weight_grad", "other ranks", (rows, 2, 1, n, k), F16, gather=True, dy=F32)
    if rows > 16:
        assert_case(case, matrix_device)
        assert matrix_device.launched == {"moe_weight_grad"}
    if n != 6:
        matrix_device.launched.clear()
        assert_case(
            grouped_case("forward", "other ranks", (rows, 2, 1, n, k), F16, gather=True, dtype=F32), matrix_device
        )
        assert "gemm_matrix_skinny" not in matrix_device.launched


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("side", ["weight_grad", "forward"])
def test_lora_of_experts_in_parts_has_the_same_bits(
    side: str, matrix_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    of: dict[str, Any] = {"dy": F32} if side == "weight_grad" else {"dtype": F32}
    case = grouped_case(side, "parts", (70, 3, 2, 16, 136), F16, gather=True, **of)
    same_bits_in_parts(case, matrix_device, monkeypatch, "gemm_matrix_skinny")


@pytest.mark.usefixtures("small_tiles")
def test_an_expert_has_no_part_of_the_gradient_of_other_experts_rows(matrix_device: Any) -> None:
    """Neither has one without rows: the gradient is finite although the next rows overflowed."""
    dy, x = np.ones((8, 16), np.float32), np.ones((8, 72), np.float16)
    x[4:] = np.inf
    start = matrix_device.upload(np.array([0, 0, 4, 8, 8], np.int32))
    for dtype in (np.float16, np.float32):
        given = matrix_device.upload(dy), matrix_device.upload(x.astype(dtype)), start
        found = matrix_device.download(matrix_device.grouped_weight_grad(*given))
        assert not found[[0, 3]].any() and np.all(found[1] == 4) and not np.isfinite(found[2]).any()
    assert matrix_device.launched == {"gemm_matrix_skinny", "moe_weight_grad"}


@pytest.mark.parametrize(("n", "k"), [(7, 70), (67, 12), (20, 132), (130, 30)])
def test_gradients_share_the_rows_of_an_expert(
    n: int, k: int, wgpu_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without tensor cores: shares of a few rows, the last of fewer; of one expert all rows, of the others none."""
    monkeypatch.setattr(grouped, "_ROWS_OF_SHARE", 16)
    names = launched(wgpu_device, monkeypatch)
    for one_has_all in (False, True):
        case = grouped_case("weight_grad", "shares", (75, 3, 2, n, k), F16, dy=F32, add=True, one_has_all=one_has_all)
        assert_case(case, wgpu_device)
    assert names == ["moe_weight_grad", "gemm_reduce"] * 2


@pytest.mark.parametrize("format", ["", "nf4", "q6_k"])
def test_a_row_for_every_fourth_expert_goes_one_by_one(format: str, matrix_device: Any) -> None:
    for tokens, alone in ((3, True), (4, False)):
        matrix_device.launched.clear()
        case = grouped_case("forward", "rows", (tokens, 12, 1, 36, 64), F16, gather=True, format=format)
        assert_case(case, matrix_device)
        assert ("gemv" in matrix_device.launched) == alone


def plan_rows(rows: int, k: int = 2048, weight: Any = "float16", trans_b: bool = True, limits: Limits = CORES) -> Any:
    """Return the plan of a grouped matmul: [rows, k] times the [1536, k] of 128 experts."""
    return grouped.plan_experts(Gemm((rows, 1536, k), "float16", weight, "float16", trans_b=trans_b), 128, limits)


def test_tiles_follow_the_rows_of_an_expert() -> None:
    """By the rows that an expert has on average, without tensor cores."""
    found = [grouped.choose_tile(mean, n) for mean, n in ((4, 8), (4, 512), (40, 512), (128, 512), (512, 512))]
    assert found[:3] + found[4:] == [TALL_SKINNY, FLAT_SKINNY, SMALL, MAIN]
    assert (found[3].m, found[3].n) == (64, 128)
    few = [grouped.choose_tile(mean, n, few_registers=True) for mean, n in ((40, 512), (128, 512), (512, 512))]
    assert few == [SMALL, FEW_REGISTERS, FEW_REGISTERS]
    assert plan_rows(65536, limits=Limits(32 << 10, few_registers=True)).tile == FEW_REGISTERS


@pytest.mark.parametrize(
    ("rows", "weight", "trans_b", "tile"),
    [
        (1024, "float16", True, (16, 64)),
        (32, "float16", False, (16, 64)),
        (4096, "float16", True, (64, 64)),
        (4096, "float16", False, (64, 128)),
        (8192, "float16", False, (128, 256)),
        (3328, NF4, True, (32, 64)),
        (3968, NF4, False, (64, 64)),
        (8192, NF4, True, (128, 128)),
        (16384, "float16", True, (128, 128)),
        (20480, "float16", True, (128, 256)),
        (13312, NF4, True, (128, 128)),
        (17536, NF4, True, (192, 192)),
        (16384, NF4, True, (128, 256)),
        (16384, NF4, False, (128, 256)),
        (16384, MXFP4, False, (128, 256)),
        (16384, NESTED, True, (192, 192)),
        (23424, NF4, True, (192, 192)),
        (23552, NF4, True, (128, 128)),
        (32768, NF4, True, (256, 128)),
        (32768, NF4, False, (256, 128)),
        (40960, NF4, False, (128, 128)),
    ],
)
def test_tiles_of_tensor_cores_follow_rows_and_weights(rows: int, weight: Any, trans_b: bool, tile: Any) -> None:
    plan = plan_rows(rows, weight=weight, trans_b=trans_b)
    assert isinstance(plan.tile, MatrixTile) and (plan.tile.m, plan.tile.n) == tile


@pytest.mark.parametrize(
    ("rows", "weight", "trans_b", "taller", "ahead"),
    [
        (120, "float16", True, 1, True),
        (136, "float16", True, 1, True),
        (119, "float16", True, 0, True),
        (137, "float16", True, 0, True),
        (256, "float16", True, 0, True),
        (120, "float16", False, 2, False),
        (264, "float16", False, 2, False),
        (265, "float16", False, 0, True),
        (512, "float16", False, 2, False),
        (640, "float16", False, 0, True),
        (136, NF4, True, 2, False),
        (137, MXFP4, False, 0, True),
        (256, NF4, True, 2, False),
        (320, NF4, True, 2, True),
        (248, NF4, False, 2, False),
        (247, NF4, False, 0, True),
        (320, NF4, False, 0, True),
        (256, NESTED, True, 2, False),
        (256, NESTED, False, 2, False),
        (256, MXFP4, True, 2, False),
        (320, MXFP4, True, 2, True),
    ],
)
def test_last_rows_go_with_the_tile_before_where_that_was_faster(
    rows: int, weight: Any, trans_b: bool, taller: int, ahead: bool
) -> None:
    """By an expert's rows."""
    tile = plan_rows(128 * rows, weight=weight, trans_b=trans_b).tile
    assert isinstance(tile, MatrixTile) and (tile.taller, tile.ahead) == (taller, ahead)
    assert tile.decode_first == (weight != "float16" and not ahead)
    others = plan_rows(128 * rows, weight=weight, trans_b=trans_b, limits=replace(CORES, lanes=64)).tile
    assert isinstance(others, MatrixTile) and others.ahead and others.taller in (0, grouped._FORWARD.taller)


def test_nf4_is_decoded_in_larger_units_where_rows_are_few() -> None:
    for rows, unit, table in ((3328, 32, False), (13312, 8, True), (16384, 16, True)):
        plan = plan_rows(rows, weight=NF4)
        assert (plan.unit, plan.table) == (unit, table)
    assert plan_rows(32768, weight=NF4, trans_b=False).unit == 16  # on tiles for about as many rows


def test_subgroups_of_64_lanes_get_tiles_that_were_timed() -> None:
    wide, usual = replace(CORES, lanes=64), (64, 64)
    for limits, k, tile in ((CORES, 128, (32, 64)), (CORES, 64, usual), (wide, 128, usual)):
        plan = plan_rows(3328, k, NF4, limits=limits)
        assert isinstance(plan.tile, MatrixTile) and (plan.tile.m, plan.tile.n) == tile
    of_64 = plan_rows(16384, weight=NF4, limits=wide)
    assert isinstance(of_64.tile, MatrixTile) and of_64.tile.m == 128


def test_a_row_for_every_fourth_expert_is_a_gemv() -> None:
    for weight, lanes in (("float16", 32), (NF4, 16)):
        one = plan_rows(32, weight=weight)
        assert one.tile == VectorTile(128, lanes, m=1) and one.factored == (weight is NF4)
    assert plan_rows(32, 256, NF4).tile == VectorTile(128, 8, m=1)  # of eight units


def test_tiles_dealt_to_other_subgroups_load_all_of_their_rows() -> None:
    for lanes in LANES:
        names = ("OF_ARRAYS", "WHOLE", "FORWARD", "FORWARD_FEWER", "BACKWARD", "WEIGHTS_ABOUT", "WHOLE_ABOUT")
        about = ("ARRAYS_ABOUT_FORWARD", "ARRAYS_ABOUT_BACKWARD")
        for high in (getattr(grouped, f"_{name}") for name in (*names, *about)):
            dealt = high.for_lanes(lanes, 16)
            assert dealt.sub_m * dealt.sg_m == high.sub_m * high.sg_m and len(dealt.shorter) == len(high.shorter)
            assert dealt.shuffles == (high.decode_first and lanes > 8)  # sixteen levels
            for number, rows in enumerate(dealt.shorter, 1):
                loaded = 8 * dealt.threads * int(dealt.expert_constants()[f"LOADS_A_{number}"])
                assert 16 * rows * dealt.sg_m * dealt.k <= loaded <= dealt.m * dealt.k
            extra = int(dealt.expert_constants().get("LOADS_EXTRA_TALLER", 0))
            assert 8 * dealt.threads * extra >= 16 * dealt.taller * dealt.k
