"""Products and the linear cross-entropy: the self-test's cases on both kinds of kernel, every tile, splits, windows.

A software driver (the one that CI has) takes kernels without workgroup memory; `tiled` makes it take a GPU's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.case_results import assert_case
from tests.wgsl.launches import launched
from tests.wgsl.small_tiles import QUICK_MAIN
from wgrad.autograd.bind import bind
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest.case import Case
from wgrad.autograd.selftest.cases import cases
from wgrad.autograd.selftest.run import selftest_cases
from wgrad.autograd.selftest.transposed import transposed_cases
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.gemm import gemm, gemm_tile
from wgrad.wgsl.gemm.gemm import matmul, multiply
from wgrad.wgsl.gemm.gemm_epilogue import Epilogue
from wgrad.wgsl.gemm.gemm_tile import (
    FEW_REGISTERS,
    FLAT_SKINNY,
    MAIN,
    SMALL,
    TALL_SKINNY,
    Tile,
    choose_tile,
    software_tile,
)
from wgrad.wgsl.gemm.plan import Gemm
from wgrad.wgsl.runtime.compile import Compiler, preprocess

OPERATORS = ("gemm_nn", "gemm_nt", "gemm_tn", "gemm_tt", "gemm", "linear_quantized", "linear_quantized_backward")
PRODUCTS = [c for c in cases() if c.op in OPERATORS or c.op.startswith(("linear_cross_entropy", "lora_"))]
# Cases of the tiles that runs have; all others have smaller ones, which a software driver compiles sooner.
WIDE = ["nn/plain/128x128x64", "nn/lowrank/41x37x67", "nt/epilogue/70x131x72"]
WIDE = [f"gemm_{name}/float32" for name in [*WIDE, "nt/tiles/259x133x130"]]
WHOLE = [f"linear_{name}" for name in ("nf4/epilogue double/70x131x72/float32", "q8_0/residual/41x37x64/float32")]
WHOLE += [
    f"linear_nf4{name}/float32"
    for name in ("/whole tiles double/128x128x128", "_backward/whole tiles lowrank/128x64x64")
]
WHOLE += ["linear_nf4_backward/tiles lowrank/131x200x160/float16", "gemm_tn/accumulate/37x41x67/float16", WIDE[-1]]
EPS = float(np.finfo(np.float32).eps)


@pytest.fixture(scope="module")
def _tiled() -> list[Any]:
    return []


@pytest.fixture
def tiled(wgpu_device: Any, _tiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device that takes the kernels of real GPUs, whatever the driver."""
    monkeypatch.setattr(gemm_tile, "MAIN", QUICK_MAIN)
    if not _tiled:
        _tiled.append(bind(WgpuDevice)())
        _tiled[0].software = False
    return _tiled[0]


def test_there_are_cases_of_every_product() -> None:
    assert {c.op for c in PRODUCTS} >= {"linear_quantized", "linear_quantized_backward", "linear_cross_entropy"}
    assert any(c.op.startswith("gemm") for c in PRODUCTS)


@pytest.mark.parametrize("case", PRODUCTS, ids=lambda c: c.name)
def test_products_on_the_drivers_own_kind_are_within_the_limits(case: Case, wgpu_device: Any) -> None:
    assert_case(case, wgpu_device)


@pytest.mark.parametrize("case", [c for c in PRODUCTS if c.name in WIDE], ids=lambda c: c.name)
def test_the_tile_of_software_drivers_is_within_the_limits(case: Case, wgpu_device: Any, monkeypatch: Any) -> None:
    """The tile of a run on a software driver, in place of the smaller one that tests have."""
    monkeypatch.setattr(gemm_tile, "software_tile", software_tile)
    assert software_tile(128, 128).tm4 == 4
    assert_case(case, wgpu_device)


def test_a_product_with_a_runs_optimization_is_within_the_limits(wgpu_device: Any) -> None:
    """In a process of its own: 16 x 16 results an invocation, and the driver's optimization, which tests leave out."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GALLIVM_PERF", "LP_NATIVE_VECTOR_WIDTH")
    }
    command = [sys.executable, "-m", "wgrad", "selftest", "--device", "wgpu"]
    command += ["--only", "gemm_tt/plain/41x123x67/float32"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and "all 1 passed" in run.stdout, run.stdout + run.stderr


@pytest.mark.parametrize("case", PRODUCTS, ids=lambda c: c.name)
def test_tiled_kernels_are_within_the_limits(case: Case, tiled: Any) -> None:
    assert_case(case, tiled)


@pytest.mark.usefixtures("as_written")
@pytest.mark.parametrize("case", [c for c in PRODUCTS if c.name in WHOLE], ids=lambda c: c.name)
def test_the_whole_tile_is_within_the_limits(case: Case, tiled: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(gemm_tile, "MAIN", MAIN)
    monkeypatch.setattr(tiled, "_compiler", Compiler(tiled._device))
    assert_case(case, tiled)


@pytest.mark.parametrize("case", transposed_cases(True), ids=lambda c: c.name)
def test_products_with_a_left_operand_transposed_first_are_within_the_limits(
    case: Case, tiled: Any, monkeypatch: Any
) -> None:
    if case.dtype.startswith("float16") and not tiled.float16:
        pytest.skip("the device has no float16")
    names = launched(tiled, monkeypatch)
    assert_case(case, tiled)
    assert names.count("gemm_transpose") == 1 and not tiled.transposes_left
    assert case.name in {c.name for c in selftest_cases(tiled)}


@pytest.mark.parametrize("trans_b", [False, True])
def test_transposing_first_changes_no_bit(trans_b: bool, tiled: Any, monkeypatch: Any) -> None:
    """The operand may be columns of a wider array, too."""
    names = launched(tiled, monkeypatch)
    rng = np.random.default_rng(3)
    a = tiled.upload(rng.standard_normal((70, 131)).astype(np.float32))
    b = tiled.upload(rng.standard_normal((83, 96) if trans_b else (96, 83)).astype(np.float32))
    found = []
    for tiled.transposes_left in (False, True):
        out = tiled.empty((70, 83))
        piece = Gemm((70, 83, 96), "float32", "float32", "float32", trans_b=trans_b, lda=131, a_column=7)
        multiply(tiled, piece, a, b, Epilogue(out))
        found.append(tiled.download(out).tobytes())
    tiled.transposes_left = False
    assert found[0] == found[1] and names.count("gemm_transpose") == 1


def _host(device: Any, array: Any) -> np.ndarray:
    assert array is not None
    return device.download(array)


def _operands(m: int, n: int, k: int, trans_a: bool, trans_b: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(m + n + k)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    left, right = (a.T if trans_a else a), (b.T if trans_b else b)
    left, right = np.ascontiguousarray(left, np.float32), np.ascontiguousarray(right, np.float32)
    exact = (left.T if trans_a else left).astype(np.float64) @ (right.T if trans_b else right).astype(np.float64)
    return left, right, exact


def _limit(a: np.ndarray, b: np.ndarray, exact: np.ndarray) -> float:
    """Twice what a plain float32 product, one addition after the other, may be off by in the worst element here."""
    k = a.shape[1]
    plain = np.zeros(exact.shape, np.float32)
    for i in range(k):
        plain += np.outer(a[:, i], b[i])
    return 2 * float(np.abs(plain - exact).max()) + 4 * EPS * float(np.abs(exact).max())


# Of sizes that divide nothing, that are whole tiles of every kind, and that are so in all but one dimension.
WHOLE_SIZES = (256, 128, 96)
SIZES = [(133, 70, 147), WHOLE_SIZES, (260, 128, 96), (256, 132, 96), (256, 128, 100)]


@pytest.mark.parametrize("tile", [QUICK_MAIN, MAIN, FEW_REGISTERS, SMALL, TALL_SKINNY, FLAT_SKINNY], ids=str)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("trans", ["nn", "nt", "tn", "tt"])
def test_every_tile_and_split(tiled: Any, tile: Tile, splits: int, trans: str) -> None:
    trans_a, trans_b = trans[0] == "t", trans[1] == "t"
    for m, n, k in {QUICK_MAIN: SIZES, MAIN: SIZES[:1], FEW_REGISTERS: SIZES[:1]}.get(tile, SIZES[:2]):
        a, b, exact = _operands(m, n, k, trans_a, trans_b)
        rng = np.random.default_rng(1)
        u, v = rng.standard_normal((m, 5)).astype(np.float32), rng.standard_normal((5, n)).astype(np.float32)
        out = tiled.upload(np.full((m, n), np.nan, np.float32))
        low = (tiled.upload(u), tiled.upload(np.ascontiguousarray(v.T if trans_b else v)))
        ways: dict[str, Any] = {"trans_a": trans_a, "trans_b": trans_b, "tile": tile, "splits": splits}
        matmul(tiled, tiled.upload(a), tiled.upload(b), Epilogue(out, 0.5, lowrank=low), **ways)
        exact = 0.5 * exact + u.astype(np.float64) @ v
        left, right = (a.T if trans_a else a), (b.T if trans_b else b)
        limit = _limit(np.hstack([0.5 * left, u]), np.vstack([right, v]), exact)
        assert np.abs(tiled.download(out) - exact).max() <= limit, (m, n, k)


@pytest.mark.parametrize(
    "name,lowrank,wanted",
    [
        ("gemm", False, "|s|m |s|m"),
        ("gemm", True, "|s|m |ss|m"),
        ("gemm_int8", False, "|s|m |s|m"),
        ("gemm_int8", True, "|s|m |s|m |s|m"),
    ],
)
def test_a_barrier_stands_before_and_behind_each_staging(name: str, lowrank: bool, wanted: str) -> None:
    """A software driver shows not all of them. s: the tile is staged, or one of the LoRA term; m: it is multiplied."""
    body = (Path(gemm.__file__).parent / f"{name}.wgsl").read_text().partition("fn main")[2].partition("\n}\n")[0]
    lines = preprocess(body.splitlines(), defaultdict(int, HAS_LOWRANK=lowrank))
    steps = {"workgroupBarrier();": "|", "load_lowrank(": "s", "#include stage": "s", " multiply": "m"}
    found = (step for line in lines for words, step in steps.items() if words in line)
    assert "".join(found) == wanted.replace(" ", "")


@pytest.mark.parametrize("tile", [MAIN, SMALL, TALL_SKINNY, FLAT_SKINNY, QUICK_MAIN], ids=str)
def test_whole_tiles_have_no_edges(tile: Tile) -> None:
    """One element more or less of any dimension is an edge; so is what a tile's invocations read beyond it."""
    assert not tile.has_edges(WHOLE_SIZES, 4)
    assert not tile.has_edges((tile.m, tile.n, tile.k), 4)
    for i in range(3):
        for one in (-1, 1):
            sizes = [tile.m, tile.n, tile.k]
            sizes[i] += one
            assert tile.has_edges((sizes[0], sizes[1], sizes[2]), 4)
    assert tile.has_edges(WHOLE_SIZES, 8) == (tile.n * tile.k // 8 < tile.threads)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("double", [False, True])
def test_whole_tiles_of_k_have_the_bits_of_partial_ones(tiled: Any, double: bool, backward: bool) -> None:
    """One, two and three of them, and with one row too many, which gives the others the same bits."""
    tile = QUICK_MAIN
    for tiles in (1, 2, 3):
        n, k = (tiles * tile.k, 2 * tile.n) if backward else (tile.n, tiles * tile.k)
        rng = np.random.default_rng(tiles)
        w = tiled.quantize(tiled.upload(rng.standard_normal((n, k)).astype(np.float32)), 64, double=double)
        x = rng.standard_normal((tile.m + 1, n if backward else k)).astype(np.float32)
        right = _host(tiled, tiled.dequantize(w))
        right = right if backward else right.T
        results = []
        for rows in (x[:-1], x):
            out = tiled.empty((len(rows), right.shape[1]))
            matmul(tiled, tiled.upload(rows), w, Epilogue(out), trans_b=not backward, tile=tile, splits=1)
            results.append(tiled.download(out))
        assert results[0].tobytes() == results[1][:-1].tobytes()
        assert np.abs(results[1] - x.astype(np.float64) @ right).max() <= _limit(x, right, x.astype(np.float64) @ right)


def test_a_split_product_is_deterministic(tiled: Any) -> None:
    a, b, _ = _operands(16, 64, 4096, True, False)
    da, db = tiled.upload(a), tiled.upload(b)
    assert choose_tile(16, 64, 4096)[1] > 1
    first, second = (tiled.download(tiled.gemm(da, db, trans_a=True)) for _ in range(2))
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("case", [c for c in PRODUCTS if c.name.startswith("lora_du")], ids=lambda c: c.name)
def test_a_product_of_loras_is_of_the_same_bits(case: Case, tiled: Any) -> None:
    """Their reduction is dealt out inside of a workgroup, in a fixed order, and no second shader adds up."""
    inputs = case.build(np.random.default_rng(0))
    results = []
    for _ in range(2):
        arrays = {name: tiled.upload(value) for name, value in inputs.items()}
        with tiled.capture() as replay:
            results.append(tiled.download(case.call(tiled, arrays)["du"]).tobytes())
        assert {name.split(":")[0] for submission in replay.submissions for name in submission.names} == {"gemm_skinny"}
    assert results[0] == results[1]


@pytest.mark.parametrize("rank", [1, 16, 64])
def test_a_skinny_matmul_fits_little_workgroup_memory(rank: int, tiled: Any) -> None:
    """A device with as little as WebGPU guarantees still takes the kernel, with the reduction in smaller pieces."""
    rng, before = np.random.default_rng(0), tiled.workgroup_bytes
    dy, b = rng.standard_normal((33, 192)).astype(np.float32), rng.standard_normal((192, rank)).astype(np.float32)
    tiled.workgroup_bytes = 16_384
    got = tiled.download(tiled.lora_du(tiled.upload(dy), tiled.upload(b), (64, 128)))
    tiled.workgroup_bytes = before
    for part, columns in enumerate((slice(0, 64), slice(64, 192))):
        exact = dy[:, columns].astype(np.float64) @ b[columns]
        limit = _limit(dy[:, columns], b[columns], exact)
        assert np.abs(got[:, part * rank : (part + 1) * rank] - exact).max() <= limit


@pytest.mark.parametrize("m,n,k", [(1, 1, 1), (2048, 16, 576), (16, 576, 2048), (2048, 576, 49152), (7, 100000, 3)])
def test_the_tile_fits_every_webgpu_device(m: int, n: int, k: int) -> None:
    tile, splits = choose_tile(m, n, k)
    assert tile.workgroup_bytes <= 16384 and tile.threads <= 256  # what every WebGPU device has
    assert 1 <= splits <= max(1, k // 64)
    assert software_tile(m, n).threads <= 256


NEEDS: dict[str, Any] = {"need_dweight": True, "need_dbias": True}


@pytest.mark.parametrize("software", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_a_head_larger_than_one_binding_gives_the_same_loss(
    software: bool, dtype: Any, wgpu_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vocabulary in windows: logits, loss and both gradients as with one binding."""
    monkeypatch.setattr(gemm_tile, "MAIN", QUICK_MAIN)
    narrow = bind(WgpuDevice)(max_binding_bytes=1 << 15)
    narrow.software = software
    rng = np.random.default_rng(3)
    tokens = 577 if dtype == np.float32 else 580  # in vectors of four, and not
    x = rng.standard_normal((13, 33)).astype(np.float32)
    w = rng.standard_normal((tokens, 33)).astype(dtype)
    targets = rng.integers(0, tokens, 13).astype(np.int32)
    targets[4] = -100
    bias = rng.standard_normal(tokens).astype(np.float32)
    cpu = ReferenceDevice()
    wide = x.astype(np.float64), w.astype(np.float64)
    exact = [np.asarray(t) for t in cpu.linear_cross_entropy(*wide, targets, bias=bias.astype(np.float64), **NEEDS)]
    plain = cpu.linear_cross_entropy(x, w.astype(np.float32), targets, bias=bias, **NEEDS)
    arrays = narrow.upload(x), narrow.upload(w), narrow.upload(targets)
    assert arrays[1].nbytes > narrow.max_binding_bytes
    got = narrow.linear_cross_entropy(*arrays, bias=narrow.upload(bias), **NEEDS)
    for value, true, near in zip(got, exact, plain):
        limit = 3 * np.abs(np.asarray(near) - true).max() + 8 * EPS * np.abs(true).max()
        assert np.abs(_host(narrow, value) - true).max() <= limit
    v = rng.standard_normal((tokens, 3)).astype(np.float32)
    right = np.concatenate([w.astype(np.float32), v], axis=1).T
    for rows, tile in ((13, QUICK_MAIN), (1, None)):
        left = rng.standard_normal((rows, 36)).astype(np.float32)
        lowrank, out = (narrow.upload(left[:, 33:].copy()), narrow.upload(v)), narrow.empty((rows, tokens))
        matmul(
            narrow,
            narrow.upload(left[:, :33].copy()),
            arrays[1],
            Epilogue(out, lowrank=lowrank),
            trans_b=True,
            tile=tile,
        )
        true = left.astype(np.float64) @ right
        assert np.abs(narrow.download(out) - true).max() <= _limit(left, right, true)


def test_cross_entropy_is_the_same_in_chunks_of_tokens(tiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks give what one gives, and no array of all logits is made."""
    from wgrad.wgsl.loss import loss

    rng = np.random.default_rng(4)
    x, w = rng.standard_normal((300, 20)).astype(np.float32), rng.standard_normal((999, 20)).astype(np.float32)
    targets = rng.integers(0, 999, 300).astype(np.int32)
    arrays = tiled.upload(x), tiled.upload(w), tiled.upload(targets)
    options = {"bias": tiled.upload(rng.standard_normal(999).astype(np.float32)), **NEEDS}
    whole = [_host(tiled, t) for t in tiled.linear_cross_entropy(*arrays, **options)]
    monkeypatch.setattr(loss, "CHUNK_BYTES", 128 * 999 * 4)
    tiled.synchronize()
    tiled.reset_peak()
    before = tiled.memory().in_use_bytes
    chunked = tiled.linear_cross_entropy(*arrays, **options)
    gradients = (x.nbytes + w.nbytes) * 1.125
    assert tiled.memory().peak_bytes - before < 300 * 999 * 4 + gradients
    for a, b in zip(whole, (_host(tiled, t) for t in chunked)):
        assert np.abs(a - b).max() <= 8 * EPS * np.abs(a).max() * 300**0.5
