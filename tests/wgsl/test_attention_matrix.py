"""Attention on tensor cores, on an emulation of them: masks, splits, groups, falling scores, and what goes there."""

from __future__ import annotations

import math
import re
import weakref
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.case_results import assert_case
from tests.wgsl.launches import launched, same_bits_in_parts
from tests.wgsl.matrix_emulation import LANES
from tests.wgsl.shader_files import SHADERS
from wgrad.autograd.selftest.attention import attention_case
from wgrad.autograd.selftest.case import F16, Case, Inputs, upload_inputs
from wgrad.autograd.selftest.run import call_case, to_host
from wgrad.wgsl.attention import attention_backward, attention_matrix
from wgrad.wgsl.attention.attention_matrix import MatrixRows
from wgrad.wgsl.attention.attention_matrix_keys import PAIRED_LANES, MatrixKeys, MatrixStored
from wgrad.wgsl.attention.attention_plan import Plan, Tile, plan

PREFILL = attention_case("prefill on a cache", (1, 19, 4, 2, 32), F16, keys=130, cache_len=62)
_KERNELS = {"forward": {"attention_matrix"}, "backward": {"attention_matrix_dq", "attention_matrix_dkv"}}
_STORED = {"attention_matrix_dq_stored", "attention_matrix_dkv"}
_PLAIN = {"attention_combine", "attention_delta", "attention_reduce"}  # for either kind of kernel


def _two_rows_alone(case: Case) -> Case:
    """Return a case in which scores fall for only two of each 16 queries, so that a subgroup rescales for one row."""

    def build(rng: np.random.Generator) -> Inputs:
        inputs = case.build(rng)
        inputs["q"][:, ~np.isin(np.arange(inputs["q"].shape[1]) % 16, (2, 13)), :, 0] = 0
        return inputs

    return replace(case, build=build)


def few_cases() -> list[Case]:
    """Every mask, of heads that a software driver compiles soon: the shapes share their shaders."""
    found = []
    for back in (False, True):
        found += [
            attention_case("grouped", (2, 70, 6, 2, 32), F16, backward=back),
            attention_case("packed", (2, 133, 4, 2, 32), F16, documents=5, backward=back),
            attention_case("window", (2, 70, 4, 2, 32), F16, window=37, backward=back),
        ]
    falling = attention_case("falling window", (2, 70, 4, 2, 32), F16, rising=-40.0, window=37)
    # A tile's largest score is 2^5 times that of the tile walked before it, so that sums before a rescaling count.
    slowly = attention_case("slow fall", (2, 150, 4, 2, 32), F16, rising=-15.0)
    two_parts = attention_case("width of two tiles", (1, 45, 2, 1, 64), F16)
    return [
        *found,
        _two_rows_alone(falling),
        slowly,
        two_parts,
        PREFILL,
    ]


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("case", few_cases(), ids=lambda case: case.name)
def test_cases_run_on_their_kernels_within_the_limits(
    matrix_device: Any, monkeypatch: pytest.MonkeyPatch, case: Case, lanes: int
) -> None:
    monkeypatch.setattr(matrix_device, "lanes", lanes)
    assert_case(case, matrix_device)
    assert matrix_device.launched - _PLAIN in (_KERNELS[case.direction], _STORED)


def test_a_row_may_see_no_key_of_a_share(matrix_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of three shares: the first queries see none of the second's, the last none of the first's."""
    chosen = plan(32, 49152)
    assert chosen
    monkeypatch.setattr(matrix_device, "attention_plan", replace(chosen, wanted_groups=64))
    assert_case(attention_case("shares", (1, 41, 1, 1, 32), F16, keys=600, cache_len=500, window=13), matrix_device)
    assert matrix_device.launched == {"attention_matrix", "attention_combine"}


def test_what_lies_beyond_the_last_token_of_a_cache_is_not_read(matrix_device: Any) -> None:
    found, inputs = [], PREFILL.inputs()
    for beyond in (0.0, np.nan):
        inputs["k"][:, 62 + 19 :] = inputs["v"][:, 62 + 19 :] = beyond
        found.append(to_host(PREFILL, matrix_device, PREFILL.call(matrix_device, upload_inputs(matrix_device, inputs))))
    np.testing.assert_array_equal(found[0]["o"], found[1]["o"])
    assert np.isfinite(found[1]["o"]).all()


@pytest.mark.parametrize(
    "case", [c for c in few_cases() if "packed" in c.name or "falling" in c.name], ids=lambda c: c.name
)
def test_rows_passed_to_registers_in_parts_are_within_the_limits(
    matrix_device: Any, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    """Tiles of many rows, of which no more columns go into the place of two tiles of keys than these take."""
    many = MatrixRows(6)
    assert many.constants(32)["LEFT_PARTS"] == 2
    monkeypatch.setattr(
        attention_matrix, "TILES", attention_matrix.TILES | dict.fromkeys(("forward", "dq"), ((0, many),))
    )
    monkeypatch.setattr(attention_matrix, "_FEW_ROWS", many.rows)
    monkeypatch.setattr(matrix_device, "scratch_bytes", 0)
    assert_case(case, matrix_device)
    assert matrix_device.launched - _PLAIN == _KERNELS[case.direction]


@pytest.mark.parametrize("lanes", PAIRED_LANES)
@pytest.mark.parametrize(
    "case", [c for c in few_cases() if "packed" in c.name or "falling" in c.name], ids=lambda c: c.name
)
def test_pairs_of_subgroups_share_rows(
    matrix_device: Any, monkeypatch: pytest.MonkeyPatch, case: Case, lanes: int
) -> None:
    """Each has half of the columns; K and V go in turns through one place, as those of wide heads."""
    pairs = MatrixRows(4, pairs=True)
    monkeypatch.setattr(matrix_device, "lanes", lanes)
    tiles = {"forward": ((0, replace(pairs, in_turns=True)),), "dq": ((0, pairs),), "dkv": ((0, MatrixKeys(4)),)}
    monkeypatch.setattr(attention_matrix, "TILES", attention_matrix.TILES | tiles)
    monkeypatch.setattr(matrix_device, "scratch_bytes", 0)
    assert_case(case, matrix_device)
    assert matrix_device.launched - _PLAIN == _KERNELS[case.direction]


@pytest.mark.parametrize(
    "case", [c for c in few_cases() if c.direction == "forward" and "slow" not in c.name], ids=lambda c: c.name
)
def test_subgroups_have_their_strips_to_themselves(
    matrix_device: Any, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    monkeypatch.setattr(matrix_device, "subgroup_barrier", True)
    own = {"forward": ((0, MatrixRows(4, own_strips=True)),)}
    monkeypatch.setattr(attention_matrix, "TILES", attention_matrix.TILES | own)
    assert_case(case, matrix_device)
    assert matrix_device.launched - _PLAIN == _KERNELS["forward"]


def test_stored_gradients_of_scores_give_dq(matrix_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One head at a time, all of a batch element, and all give the same bits, whatever their memory held before."""
    plain, tile, before = matrix_device.empty, Tile(32, 32, 8, 8, 8, 4), list[Any]()

    def empty(shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
        if shape[3:] != (16,):
            return plain(shape, dtype)
        assert all(lease() is None for lease in before), "ds of the part before still takes memory"
        ds = matrix_device.view(matrix_device.upload(np.full(math.prod(shape), np.nan, dtype)), shape, 0)
        before.append(weakref.ref(ds.lease))
        return ds

    monkeypatch.setattr(matrix_device, "empty", empty)
    monkeypatch.setattr(matrix_device, "attention_plan", Plan(tile, tile, tile, wanted_groups=1))
    monkeypatch.setattr(attention_matrix, "TILES", attention_matrix.TILES | {"dkv": ((0, MatrixKeys(2)),)})
    case = attention_case("stored", (2, 133, 4, 2, 32), F16, documents=3, window=90, backward=True)
    names, found = launched(matrix_device, monkeypatch, "attention_matrix_dq_stored"), set[bytes]()
    of_a_head = 2 * 32 * MatrixKeys(2).stored_rows(133)
    least = attention_backward.LEAST_STORED
    monkeypatch.setattr(attention_backward, "LEAST_STORED", 1)
    for heads in (1, 3, 4):
        monkeypatch.setattr(matrix_device, "scratch_bytes", heads * of_a_head)
        outputs = to_host(case, matrix_device, call_case(case, matrix_device))
        found.add(b"".join(outputs[name].tobytes() for name in ("dq", "dk", "dv")))
    assert len(names) == 4 + 2 + 1 and len(found) == 1
    assert_case(case, matrix_device)
    with monkeypatch.context() as patch:  # tiles of four times as many keys as are read at a time
        patch.setattr(attention_matrix, "TILES", attention_matrix.TILES | {"dkv": ((0, MatrixKeys(4)),)})
        patch.setattr(attention_matrix, "stored_tile", lambda width: MatrixStored(4, 4, columns=16))
        patch.setattr(matrix_device, "scratch_bytes", 4 * 2 * 32 * MatrixKeys(4).stored_rows(133))
        assert_case(replace(case, name="stored, 64 keys"), matrix_device)
    assert len(names) == 4 + 2 + 1 + 2
    names.clear()
    for tiles, nbytes in ((1, of_a_head - 1), (least, of_a_head)):
        monkeypatch.setattr(attention_backward, "LEAST_STORED", tiles)
        monkeypatch.setattr(matrix_device, "scratch_bytes", nbytes)
        assert_case(case, matrix_device)
    assert not names, "ds of one head takes too much, or its launches are too short"


def test_gradients_of_scores_are_stored_where_they_fit_and_fill_the_gpu(
    matrix_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each bound they are stored, and one below it they are not."""
    monkeypatch.setattr(attention_matrix, "TILES", attention_matrix.TILES | {"dkv": ((0, MatrixKeys(2)),)})
    q, k = (matrix_device.empty((2, 133, heads, 32), np.float16) for heads in (4, 2))
    of_all = 2 * 4 * 32 * MatrixKeys(2).stored_rows(133)
    memory = attention_matrix.stored_tile(32).workgroup_bytes(32)
    assert memory == 16 * (32 * 17 + 32 * 5 + 4 * 16 * 6), "ds and k in eights, and the strips of the shader"
    assert of_all == 8 * 32 * sum(32 * (block // 2 + 1) for block in range(10)), "rows up to the end of a tile of keys"
    tile, groups = Tile(32, 32, 8, 8, 8, 4), 2 * 2 * 4  # tiles of 128 queries, batch, heads

    def stored(wanted: int = groups, **limits: int) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(matrix_device, "attention_plan", Plan(tile, tile, tile, wanted_groups=wanted))
            for name, value in limits.items():
                patch.setattr(matrix_device, name, value)
            return attention_backward._stored(matrix_device, 0.0, q, q, k, k)

    assert stored() and not stored(groups + 1)
    for name, least in {"scratch_bytes": of_all, "max_binding_bytes": of_all, "workgroup_bytes": memory}.items():
        assert stored(**{name: least}) and not stored(**{name: least - 1}), name
    assert stored(lanes=16).tile.lanes == 16
    found = attention_backward._Stored(attention_matrix.stored_tile(32), rows=1, most=3)
    assert [part.kv_heads for part in found.parts(1, 4)] == [2, 2], "parts are not equal"


@pytest.mark.parametrize("width", [32, 64, 96, 128])
def test_every_column_of_a_head_is_read(width: int) -> None:
    """Test each tile and number of lanes: of the three matrices of a head of 96, one alone was once read."""
    for kernel, tiles in attention_matrix.TILES.items():
        for lanes in LANES:
            tile_of = [replace(tile, lanes=lanes) for least, tile in tiles if least <= width]
            for tile in tile_of:
                if not tile.serves(lanes):
                    continue
                found: dict[str, Any] = tile.constants(width)
                threads = found["SG"] * found.get("SG_LANES", lanes)
                parts = found["LEFT_PARTS"]
                assert 16 * parts * found["LEFT_DF"] == width
                assert found["LOADS_ROWS"] * threads >= tile.rows * width // 8 // parts
                assert found["LOADS_COLUMNS"] * threads >= tile.columns * width // 8
                vectors = found["VECTORS"] if kernel == "dkv" else found["PAIRS"]
                assert vectors * threads == tile.rows * tile.columns // 4
                assert threads <= 512


def test_shapes_get_their_tiles_on_tensor_cores(matrix_device: Any) -> None:
    def tile(kernel: str, *shape: int, dtype: Any = np.float16, memory: int = 49152, **options: Any) -> Any:
        return attention_matrix.served(kernel, memory, 256, matrix_device.empty(shape, dtype), **options)

    def rows(kernel: str, *shape: int, **options: Any) -> Any:
        found = tile(kernel, *shape, **options)
        return found and found.rows

    # Of 128 rows where so many workgroups have them, of wide heads.
    assert rows("forward", 1, 8191, 32, 128) == 64 and rows("forward", 1, 8192, 32, 128) == 128
    assert rows("forward", 4, 1023, 32, 96) == 64 and rows("forward", 4, 1024, 32, 96) == 128
    for width in (64, 128):
        assert [rows("forward", 4, queries, 32, width, lanes=64) for queries in (255, 256)] == [64, 128]
    assert rows("forward", 4, 1024, 32, 64) == 64
    assert tile("forward", 1, 2048, 32, 128).in_turns and not tile("forward", 1, 2048, 32, 64).in_turns
    # A subgroup has its strips to itself where its barriers order them.
    for queries, width, lanes, barrier in product((8191, 8192), (96, 128), (16, 32), (False, True)):
        own = tile("forward", 1, queries, 32, width, lanes=lanes, subgroup_barrier=barrier).own_strips
        assert own == (queries == 8192 and width == 128 and lanes == 32 and barrier)
    assert rows("dq", 1, 1024, 32, 64) == 64 and rows("dq", 1, 1024, 32, 128) == 128
    # In pairs, but not few rows of wide heads in dq.
    for kernel, queries, width in (("forward", 16, 32), ("forward", 8192, 128), ("dq", 4096, 64), ("dq", 4096, 128)):
        for lanes in LANES:
            assert tile(kernel, 1, queries, 32, width, lanes=lanes).pairs == (lanes in (16, 32))
    assert not tile("dq", 1, 16, 32, 128).pairs
    assert rows("forward", 1, 1024, 32, 64, memory=32768) == 64
    # dk and dv of 128 keys, in pairs, where those fill the GPU.
    assert [rows("dkv", 1, queries, 32, 128) for queries in (16, 1023, 1024)] == [64, 64, 128]
    assert [tile("dkv", 1, 1024, 32, width).subgroups for width in (64, 128)] == [4, 8]  # two of four run at once
    assert [tile("dkv", 1, 1023, 32, width).pairs for width in (64, 128)] == [True, False]
    alone = tile("dkv", 1, 1024, 32, 64, lanes=8)  # which share nothing in pairs
    assert (alone.subgroups, alone.columns) == (8, 16)
    assert rows("dkv", 1, 1024, 32, 128, lanes=64) == rows("dkv", 1, 1024, 32, 128, memory=32768) == 64
    assert rows("dkv", 1, 64, 2, 128, memory=16384) == 32
    assert rows("dkv", 1, 64, 2, 128, memory=16000) is None  # its tiles do not fit
    assert (
        rows("dkv", 1, 15, 2, 64) is None and rows("dkv", 1, 64, 2, 40) is None and rows("dkv", 1, 64, 2, 256) is None
    )
    assert rows("dkv", 1, 64, 2, 64, dtype=np.float32) is None


def test_few_workgroups_of_keys_are_divided_by_heads_and_then_by_queries(
    matrix_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four subgroups leave a GPU room for more workgroups than eight."""
    found = []

    def launch(device: Any, shader: str, arrays: Any, params: list[Any], *more: Any, **options: Any) -> None:
        found.extend([params[5:7]] * (shader == "attention_matrix_dkv"))

    def parts(batch: int, queries: int, heads: int, kv_heads: int, width: int) -> list[Any]:
        dry = matrix_device.dry_run()
        dry.max_binding_bytes = dry.max_buffer_bytes = 1 << 30
        of_queries = dry.empty((batch, queries, heads, width), np.float16)
        of_keys = dry.empty((batch, queries, kv_heads, width), np.float16)
        lse, doc_start = dry.empty((batch, heads, queries)), dry.empty((batch, queries), np.int32)
        dry.attention_backward(of_queries, of_queries, of_keys, of_keys, of_queries, lse, doc_start, scale=0.1)
        return found.pop()

    def of_gpu(device: Any, width: int) -> Plan:
        chosen = plan(width, 49152, "DiscreteGPU")
        assert chosen is not None
        return chosen

    monkeypatch.setattr(attention_backward, "launch_range", launch)
    monkeypatch.setattr(attention_backward, "plan_of", of_gpu)
    assert parts(1, 2048, 9, 3, 64) == [3, 2]  # 96 tiles; 384 are wanted, 512 before heads stay together
    assert parts(1, 8192, 9, 3, 64) == [3, 1]  # 384
    assert parts(1, 2048, 12, 12, 64) == [1, 1]
    assert parts(1, 2048, 14, 2, 64) == [7, 1]
    assert parts(1, 4096, 32, 8, 64) == [1, 1]
    assert parts(1, 2048, 8, 2, 128) == [4, 1]  # 64, of eight subgroups: 256 are wanted
    assert parts(1, 1 << 17, 24, 2, 64) == [1, 2]  # a workgroup would take too long alone


def test_a_workgroup_has_at_most_as_many_subgroups_as_have_a_flag(matrix_device: Any) -> None:
    """Each has one in `grown`. Two subgroups of 8 lanes share 16 rows, so tiles of 128 rows would have 16 subgroups."""
    declared = re.search(r"var<workgroup> grown: array<u32, (\d+)>", SHADERS["attention_matrix.wgsl"])
    assert declared and int(declared[1]) == attention_matrix.MOST_SUBGROUPS
    for kernel in attention_matrix.TILES:
        for lanes in LANES:
            for width in (32, 96, 128):
                q = matrix_device.empty((4, 4096, 32, width), np.float16)
                found = attention_matrix.served(kernel, 1 << 20, 1, q, lanes=lanes)
                assert found is not None and found.workgroup_subgroups <= attention_matrix.MOST_SUBGROUPS


@pytest.mark.parametrize("backward", [False, True])
def test_a_softcap_goes_to_the_plain_kernels(matrix_device: Any, backward: bool) -> None:
    """The units' kernels know none."""
    case = attention_case("softcap", (1, 37, 2, 1, 32), F16, softcap=1.5, backward=backward)
    assert_case(case, matrix_device)
    assert not any("matrix" in shader for shader in matrix_device.launched)


@pytest.mark.parametrize("kernels", [_KERNELS["forward"], _KERNELS["backward"], _STORED], ids=["o", "dq", "stored"])
def test_several_dispatches_give_the_same_bits(
    matrix_device: Any, monkeypatch: pytest.MonkeyPatch, kernels: set[str]
) -> None:
    direction = "forward" if kernels == _KERNELS["forward"] else "backward"
    case = next(c for c in few_cases() if "packed" in c.name and c.direction == direction)
    if kernels != _STORED:
        monkeypatch.setattr(matrix_device, "scratch_bytes", 0)
    same_bits_in_parts(case, matrix_device, monkeypatch, *kernels)
