"""Products on matrix units, on an emulation of them: the forms that they serve, and which products go there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.wgsl.matrix_emulation import emulated
from wgrad.autograd.bind import bind
from wgrad.autograd.selftest.case import Case
from wgrad.autograd.selftest.matrix import product_cases, skinny_cases
from wgrad.autograd.selftest.run import check_case
from wgrad.wgsl import gemm_matrix
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.runtime import compile as wgsl_compile


@pytest.fixture(scope="module")
def _device() -> Any:
    device = bind(WgpuDevice)()
    device.matrix_units = True
    device.software = False  # the ways of a card
    return device


# The same code in sizes that a software driver compiles soon: subgroups side by side, and groups of columns.
SMALL_LARGE = gemm_matrix.MatrixTile(2, 1, 1, 2, 1)
SMALL_MEDIUM = gemm_matrix.MatrixTile(1, 2, 1, 1, 1)


@pytest.fixture
def matrix_device(_device: Any, wgpu_device: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[WgpuDevice]:
    """A device that takes gemm_matrix.wgsl, emulated."""
    if not _device.float16:
        pytest.skip("the device has no float16")
    plain = wgsl_compile.assemble

    def assemble(source: str, constants: dict) -> str:
        text = plain(source, constants)
        return emulated(text) if "wgpu_cooperative_matrix" in text else text

    monkeypatch.setattr(wgsl_compile, "assemble", assemble)
    monkeypatch.setattr(gemm_matrix, "LARGE", SMALL_LARGE)
    monkeypatch.setattr(gemm_matrix, "MEDIUM", SMALL_MEDIUM)
    yield _device
    _device.synchronize()


def few_cases() -> list[Case]:
    """Every form on one tile, and on the other what hangs on the tile's layout. A compilation takes seconds."""
    medium = [c for c in product_cases() if "large tile" not in c.name and "x256/" not in c.name]
    words = ("gemm_nn/plain", "gemm_tt/plain", "gemm_nt/epilogue", "linear_nf4_backward/lowrank")
    return medium + [
        c for c in product_cases() if "large tile" in c.name and "x256/" not in c.name and c.name.startswith(words)
    ]


@pytest.mark.parametrize("case", few_cases() + skinny_cases(), ids=lambda case: case.name)
def test_case(matrix_device: Any, case: Case) -> None:
    before = set(matrix_device._compiler._pipelines)
    result = check_case(case, matrix_device)
    assert result.ok, f"{result.output} is off by {result.error:.3g}, allowed {result.limit:.3g}"
    made = {key[0] for key in set(matrix_device._compiler._pipelines) - before}
    assert not {"gemm"} & made  # no product of these cases goes anywhere else
    assert not case.name.split("/")[1] == "skinny" or made <= {"gemm_matrix_skinny"}


def test_which_products_are_served(matrix_device: Any) -> None:
    half, single = (matrix_device.empty((128, 128), t) for t in (np.float16, np.float32))
    served = gemm_matrix.served
    assert served(half, half, half, (128, 128, 128), False, False, 128)
    assert served(single, half, half, (128, 128, 128), False, True, 128)
    assert not served(single, half, single, (128, 128, 128), False, True, 128)  # float32 would be rounded
    assert not served(single, single, single, (128, 128, 128), False, False, 128)  # float32 stays float32
    assert not served(half, half, half, (32, 128, 128), False, False, 128)  # too few rows
    assert not served(half, half, half, (128, 132, 128), False, False, 128)  # rows of B start anywhere
    assert not served(half, half, half, (128, 128, 132), False, True, 132)


def test_tiles_fit_the_device() -> None:
    assert gemm_matrix.choose_tile(8192, 8192, 64, 1, 49152)[0] is gemm_matrix.LARGE
    assert gemm_matrix.choose_tile(8192, 8192, 64, 1, 32768)[0] is gemm_matrix.MEDIUM
    assert gemm_matrix.MEDIUM.most_workgroup_bytes <= 32768
    assert gemm_matrix.choose_tile(128, 128, 4096, 1, 49152) == (gemm_matrix.MEDIUM, 8)
