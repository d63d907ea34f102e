"""Choice of the kernel for each GEMM of a training step of a 1B model, and of decoding, without a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.wgsl.matrix_emulation import LANES
from wgrad.autograd.bind import bind
from wgrad.device.formats.frozen_weight import formats
from wgrad.wgsl.attention import attention
from wgrad.wgsl.formats.formats import WeightForm
from wgrad.wgsl.gemm import gemm_tile
from wgrad.wgsl.gemm import plan as plans
from wgrad.wgsl.gemm.gemm_matrix import (
    FEW_ROWS_OF_ARRAYS,
    FEW_ROWS_TILES,
    LARGE,
    MEDIUM,
    NARROW,
    OF_HEADS,
    TWO_AT_ONCE,
    MatrixTile,
)
from wgrad.wgsl.gemm.gemm_skinny import Skinny
from wgrad.wgsl.gemm.gemm_tile import FEW_REGISTERS, FLAT_SKINNY, MAIN, SMALL, TALL_SKINNY
from wgrad.wgsl.gemm.plan import Gemm, Limits, Plan, linear_plan, plan, skinny_tile
from wgrad.wgsl.webgpu_trace import PROFILES, TraceDevice

PLAIN = Limits(32 << 10, 1 << 30)  # a GPU without tensor cores
INTEL = replace(PLAIN, few_registers=True)
CORES = Limits(48 << 10, 1 << 30, tensor_cores=True)
WIDE_SUBGROUPS = replace(CORES, lanes=64)
SOFTWARE = Limits(32 << 10, 1 << 30, software=True)
F32, F16, BF16 = "float32", "float16", "bfloat16"
TOKENS, HIDDEN, MLP, VOCABULARY, RANK = 2048, 2048, 8192, 128256, 16
FORWARD, HEAD = (TOKENS, MLP, HIDDEN), (256, VOCABULARY, HIDDEN)


def gemm(mnk: tuple[int, int, int], types: tuple[str, str, str], layout: str = "nt", **more: Any) -> Gemm:
    return Gemm(mnk, *types, trans_a=layout[0] == "t", trans_b=layout[1] == "t", **more)


def test_a_dry_run_plans_each_gemm_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device does not remember: what it may use can change, as where its tensor cores turn out to be wrong."""
    planned = list[Gemm]()

    def noted(one: Gemm, limits: Limits) -> Plan:
        planned.append(one)
        return plan(one, limits)

    monkeypatch.setattr(plans, "plan", noted)
    device, one, other = TraceDevice(PROFILES[0]), gemm(HEAD, (F32, F32, F32)), gemm(FORWARD, (F32, F32, F32))
    for on, times in ((device, [one, other, one]), (device.dry_run(), [one, other]), (device.dry_run(), [one, other])):
        planned.clear()
        found = [plans.plan_on(on, each) for each in (one, other, one)]
        assert planned == times and found == [plan(each, Limits.of(on)) for each in (one, other, one)]


@pytest.mark.parametrize(
    "limits, mnk, types, layout, shader, tile, splits",
    [
        # the head, and LoRA's u = x A^T, in float32
        (PLAIN, HEAD, (F32, F32, F32), "nt", "gemm", MAIN, 1),
        (PLAIN, HEAD, (F32, BF16, F32), "nt", "gemm", MAIN, 1),
        (PLAIN, (TOKENS, RANK, HIDDEN), (F32, F32, F32), "nt", "gemm", TALL_SKINNY, 9),
        (PLAIN, (TOKENS, 24, HIDDEN), (F32, F32, F32), "nt", "gemm", SMALL, 12),
        (PLAIN, (1, MLP, HIDDEN), (F32, F32, F32), "nt", "gemv", None, 1),
        (PLAIN, (17, MLP, HIDDEN), (F32, F32, F32), "nt", "gemm", SMALL, 3),
        (PLAIN, FORWARD, (F16, F16, F16), "nt", "gemm", MAIN, 1),
        # tensor cores: float16, never float32 with a float32 result
        (CORES, FORWARD, (F16, F16, F16), "nt", "gemm_matrix", TWO_AT_ONCE, 1),
        (CORES, (TOKENS - 128, MLP, HIDDEN), (F16, F16, F16), "nt", "gemm_matrix", LARGE, 1),  # fewer tiles
        (CORES, (TOKENS, HIDDEN, HIDDEN), (F16, F16, F32), "tn", "gemm_matrix", TWO_AT_ONCE, 1),
        (CORES, (TOKENS, HIDDEN, HIDDEN), (F16, BF16, F16), "nt", "gemm_matrix", TWO_AT_ONCE, 1),
        (CORES, (TOKENS, HIDDEN, HIDDEN), (F16, BF16, F16), "nn", "gemm_matrix", TWO_AT_ONCE, 1),
        (WIDE_SUBGROUPS, FORWARD, (F16, F16, F16), "nt", "gemm_matrix", LARGE, 1),
        (WIDE_SUBGROUPS, (TOKENS, HIDDEN, HIDDEN), (F16, F16, F32), "tn", "gemm_matrix", LARGE, 1),
        (WIDE_SUBGROUPS, (TOKENS, HIDDEN, HIDDEN), (F16, BF16, F16), "nt", "gemm_matrix", OF_HEADS, 1),
        (CORES, HEAD, (F16, BF16, F32), "nt", "gemm_matrix", OF_HEADS, 1),
        (CORES, (256, HIDDEN, VOCABULARY), (F16, BF16, F16), "nn", "gemm_matrix", TWO_AT_ONCE, 8),  # its gradient
        (CORES, (256, HIDDEN, VOCABULARY), (F16, F16, F16), "nn", "gemm_matrix", LARGE, 8),
        (CORES, (256, HIDDEN, VOCABULARY), (F16, F16, F16), "tn", "gemm_matrix", LARGE, 8),
        (CORES, (256, HIDDEN, VOCABULARY), (F16, BF16, F16), "nt", "gemm_matrix", LARGE, 8),
        (CORES, (TOKENS, 16384, HIDDEN), (F16, BF16, F16), "nt", "gemm_matrix", OF_HEADS, 1),
        (CORES, (TOKENS, 16376, HIDDEN), (F16, BF16, F16), "nt", "gemm_matrix", TWO_AT_ONCE, 1),
        # few tiles: splits that fill the GPU twice, where K is long enough for so many
        (CORES, (TOKENS, 576, 1536), (F16, F16, F16), "nt", "gemm_matrix", TWO_AT_ONCE, 3),
        (CORES, (TOKENS, 576, 1528), (F16, F16, F16), "nt", "gemm_matrix", MEDIUM, 1),
        (CORES, (512, 4096, 4096), (F16, F16, F16), "nn", "gemm_matrix", TWO_AT_ONCE, 2),
        (CORES, (512, 4096, 4088), (F16, F16, F16), "nn", "gemm_matrix", MEDIUM, 1),
        (CORES, (1024, 1024, 8192), (F16, F16, F16), "nt", "gemm_matrix", TWO_AT_ONCE, 4),
        (WIDE_SUBGROUPS, (1024, 1024, 8192), (F16, F16, F16), "nt", "gemm_matrix", MEDIUM, 2),
        (CORES, FORWARD, (F32, F32, F32), "nt", "gemm", MAIN, 1),
        (CORES, (7, MLP, HIDDEN), (F16, F16, F16), "nt", "gemv", None, 1),
        (CORES, (8, MLP, HIDDEN), (F16, F16, F16), "nt", "gemm_matrix", NARROW, 3),
        (CORES, (TOKENS, MLP, HIDDEN + 4), (F16, F16, F16), "nt", "gemm", MAIN, 1),  # rows of no eights
        (replace(CORES, workgroup_bytes=32 << 10), FORWARD, (F16, F16, F16), "nt", "gemm_matrix", MEDIUM, 1),
        (CORES, (TOKENS, RANK, HIDDEN), (F16, F32, F32), "nn", "gemm_matrix_skinny", None, 1),
        (CORES, (TOKENS, RANK, MLP), (F16, F32, F32), "nn", "gemm_matrix_skinny", None, 8),
        (CORES, (TOKENS, 65, HIDDEN), (F16, F32, F32), "nn", "gemm", MAIN, 13),  # a rank beyond the largest
        # Intel: 8 x 8 results an invocation do not fit its registers
        (INTEL, FORWARD, (F16, F16, F16), "nt", "gemm", FEW_REGISTERS, 1),
        (INTEL, (TOKENS, RANK, HIDDEN), (F32, F32, F32), "nt", "gemm", TALL_SKINNY, 9),
        (INTEL, (8, MLP, HIDDEN), (F32, F32, F32), "nt", "gemv", None, 1),
        (PLAIN, (9, MLP, HIDDEN), (F32, F32, F32), "nt", "gemv", None, 1),
        (INTEL, (9, MLP, HIDDEN), (F32, F32, F32), "nt", "gemm", FLAT_SKINNY, 2),
        # a driver on the CPU
        (SOFTWARE, HEAD, (F32, BF16, F32), "nt", "gemm_direct", None, 1),
        (SOFTWARE, (1, MLP, HIDDEN), (F32, F32, F32), "nt", "gemv", None, 1),
    ],
)
def test_arrays_take_the_kernel_of_their_size_and_dtypes(
    limits: Limits, mnk: tuple[int, int, int], types: tuple[str, str, str], layout: str, shader: str, tile: Any,
    splits: int,
) -> None:  # fmt: skip
    found = plan(gemm(mnk, types, layout, plain=True), limits)
    assert (found.shader, found.splits) == (shader, splits)
    assert tile is None or found.tile == tile
    assert found.k_per_split * (found.splits - 1) < mnk[2] <= found.k_per_split * found.splits


def test_columns_that_start_anywhere_keep_a_gemm_off_tensor_cores() -> None:
    for column, shader in ((8, "gemm_matrix"), (4, "gemm")):
        piece = gemm(FORWARD, (F16, F16, F16), lda=2 * HIDDEN, a_column=column)
        assert plan(piece, CORES).shader == shader


def test_a_software_driver_has_its_own_tile_whatever_is_asked_for() -> None:
    asked = plan(gemm(FORWARD, (F32, F32, F32)), SOFTWARE, SMALL, 4)
    assert (asked.shader, asked.tile, asked.splits) == ("gemm_direct", gemm_tile.software_tile(TOKENS, MLP), 1)
    assert plan(gemm(FORWARD, (F32, F32, F32)), SOFTWARE).tile == asked.tile


def test_arrays_have_a_tile_for_33_to_64_rows() -> None:
    """This is for x Wᵀ with float16 weights, and subgroups of up to 32."""
    few, other = FEW_ROWS_OF_ARRAYS, linear_plan((64, 4096, 4096), F16, F16, True, CORES)
    tiles = {rows: linear_plan((rows, 4096, 4096), F16, F16, False, CORES).tile for rows in (32, 33, 64, 65)}
    assert [tile == few for tile in tiles.values()] == [False, True, True, False] and other.tile != few
    assert linear_plan((64, 4096, 4096), F16, BF16, False, CORES).tile != few
    assert linear_plan((64, 4096, 4096), F16, F16, False, replace(CORES, lanes=64)).tile != few


def test_nested_scales_stay_outside_of_a_narrow_tile() -> None:
    found = linear_plan((16, 4096, 4096), F16, "nf4", False, CORES)
    assert (found.tile, found.table, found.unit) == (NARROW, False, 32)
    found = linear_plan((64, 4096, 4096), F16, "nf4", False, CORES)
    assert (found.tile, found.table, found.unit) == (FEW_ROWS_TILES[1], False, 32)


def test_what_is_added_keeps_a_gemm_off_the_skinny_kernel() -> None:
    types = (F16, F32, F32)
    assert plan(gemm((TOKENS, RANK, HIDDEN), types, "nn"), CORES).shader == "gemm"


@pytest.mark.parametrize("name", formats())
@pytest.mark.parametrize("backward", [False, True])
def test_weights_take_the_kernel_of_their_rows(name: str, backward: bool) -> None:
    def of(rows: int, limits: Limits, dtype: str = F32) -> Plan:
        return linear_plan((rows, MLP, HIDDEN), dtype, name, backward, limits)

    few = "gemm" if backward else "gemv"
    assert [of(rows, PLAIN).shader for rows in (1, 16, 17, TOKENS)] == [few, few, "gemm", "gemm"]
    assert not of(TOKENS, PLAIN).dequantized
    assert of(TOKENS, SOFTWARE).dequantized == F32 and of(TOKENS, SOFTWARE).shader == "gemm_direct"
    assert of(1, SOFTWARE).shader == ("gemm_direct" if backward else "gemv")
    assert of(128, replace(PLAIN, int8=True)).shader == "gemm_int8"
    assert of(127, replace(PLAIN, int8=True)).shader == "gemm"
    many, some = of(TOKENS, CORES, F16), of(256, CORES, F16)
    assert (many.shader, many.tile, many.dequantized) == ("gemm_matrix", LARGE, F16)
    assert some.shader == "gemm_matrix" and not some.dequantized and some.table
    assert many.gemm.in_blocks and not some.gemm.in_blocks and not of(TOKENS, SOFTWARE).gemm.in_blocks
    assert not of(TOKENS, replace(CORES, max_binding_bytes=8 << 20), F16).dequantized


def test_a_weight_is_dequantized_first_where_there_are_many_rows() -> None:
    """More than two of the tallest tiles hold, or as many where the GEMM of arrays fills the GPU."""
    for rows, columns, first in ((513, 64, F16), (512, 4096, ""), (512, 14336, F16), (511, 14336, "")):
        assert linear_plan((rows, columns, 4096), F16, "nf4", False, CORES).dequantized == first


def test_a_weight_has_blocks_where_both_sides_are_whole_ones() -> None:
    for n, k, blocks in ((80, 64, True), (72, 64, False), (80, 72, False)):
        for backward in (False, True):
            chosen = linear_plan((TOKENS, n, k), F16, "nf4", backward, CORES)
            assert chosen.dequantized == F16 and chosen.gemm.in_blocks == blocks


def test_rows_that_end_within_a_unit_are_dequantized_first() -> None:
    assert linear_plan((33, 64, 100), F32, "nf4", False, PLAIN).dequantized == F32  # 100 is no multiple of 8


def test_rounded_values_are_scaled_one_by_one() -> None:
    form = WeightForm("nf4", 8, (4096, 1024))
    for rows, weight, factored in ((4, form, True), (5, form, False), (1, replace(form, rounded=True), False)):
        found = plan(Gemm((rows, 4096, 1024), F32, weight, F32, trans_b=True), PLAIN)
        assert (found.shader, found.factored) == ("gemv", factored)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("memory", [32 << 10, 48 << 10])
@pytest.mark.parametrize("name", [F16, BF16, *formats()])
def test_every_invocation_reads_as_much(lanes: int, memory: int, name: str) -> None:
    """Tiles are dealt to subgroups of any size, for every format, and are as large as before."""
    limits = replace(CORES, lanes=lanes, workgroup_bytes=memory)
    for rows in (16, 64, 100, 256, 512, TOKENS):
        found = linear_plan((rows, MLP, HIDDEN), F16, name, False, limits)
        tile = found.tile
        assert isinstance(tile, MatrixTile) and tile.lanes == lanes and tile.most_workgroup_bytes <= memory
        assert tile.m * tile.k % (8 * tile.threads) == tile.n * tile.k % (found.unit * tile.threads) == 0
        wide = linear_plan((rows, MLP, HIDDEN), F16, name, False, replace(limits, lanes=32)).tile
        assert isinstance(wide, MatrixTile) and (wide.m, wide.n) == (tile.m, tile.n) or lanes > 32


def test_left_operands_of_wide_matmuls_are_transposed_first() -> None:
    """Many columns gain more than transposing costs; operands so large that a step would need much more memory stay."""

    def of(m: int, n: int, k: int, limits: Limits = PLAIN, layout: str = "nt", **options: Any) -> bool:
        return plan(gemm((m, n, k), (F32, F32, F32), layout, **options), limits).transposes_a

    assert of(2048, 2048, 2048) and of(256, 128256, 4096) and of(2048, 4096, 14336) and of(8192, 4096, 4096)
    assert not of(2048, 2047, 2048)  # columns
    assert not of(255, 2048, 65536) and not of(65536, 2048, 255) and not of(256, 4096, 4095)  # sides, elements
    assert not of(8192, 4096, 14336)  # 448 MiB
    assert not of(2048, 2048, 2048, layout="tt") and not of(2048, 2048, 2048, batch=2)
    assert not of(2048, 2048, 2048, SOFTWARE)
    assert not plan(gemm((2048, 2048, 2048), (F32, F32, F32)), PLAIN, SMALL, 1).transposes_a
    assert of(64, 64, 64, replace(PLAIN, transposes_left=True))


@pytest.mark.parametrize("dtype, limits, served", [(F16, CORES, True), (F32, CORES, False), (F16, PLAIN, False)])
def test_a_lora_stack_has_no_tile_over_two_weights(dtype: str, limits: Limits, served: bool) -> None:
    """No tile has columns of two weights."""
    parts = (2048, 512, 512)
    for along_rows in (False, True):
        skinny = Skinny((TOKENS, 3072), dtype, 3 * RANK, RANK, True, along_rows, parts=parts, part_rank=RANK)
        tile = skinny_tile(skinny, limits)
        assert (tile is not None) == served
        assert tile is None or not along_rows or not any(part % tile.side for part in parts)


def test_a_plan_is_explained_in_words() -> None:
    assert str(linear_plan(FORWARD, F16, "nf4", True, CORES)) == (
        "gemm_matrix, tile 128x256x32, 8 x 16 x 1 workgroups, weight dequantized to float16 first"
    )
    assert str(linear_plan((1, HIDDEN, HIDDEN), F32, "q8_0", False, PLAIN)) == (
        "gemv, 128 threads per 4 results, 256 x 1 x 1 workgroups"
    )
    skinny = plan(gemm((TOKENS, RANK, MLP), (F16, F32, F32), "nn", plain=True), CORES)
    assert str(skinny) == "gemm_matrix_skinny, tile of 64, 32 x 1 x 8 workgroups, K in 8 parts of 1024"


@pytest.mark.parametrize(("vendor", "few"), [(0x8086, True), (0x10DE, False), (0x1002, False)])
def test_intels_gpus_have_few_registers(vendor: int, few: bool) -> None:
    """A dry run chooses like the device."""

    class Card(TraceDevice):
        def _start(self, device: Any, queue: Any, info: Any, *rest: Any) -> None:
            super()._start(device, queue, {**info, "vendor_id": vendor}, *rest)

    device: Any = bind(Card)(PROFILES[1])
    assert Limits.of(device).few_registers == few == Limits.of(device.dry_run()).few_registers
    device.subgroup_barrier = few
    assert device.dry_run().subgroup_barrier == few
    tile = MAIN if not few else FEW_REGISTERS
    assert plan(gemm(FORWARD, (F16, F16, F16)), Limits.of(device)).tile == tile
    chosen = attention.plan_of(device, 64)
    assert (chosen.forward.depth == 4) == few
