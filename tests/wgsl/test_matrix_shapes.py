"""Kernels on tensor cores of other shapes than 16 x 16 x 16: the text of their parts, and results on an emulation."""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.case_results import assert_case
from tests.wgsl import test_attention_matrix, test_gemm_matrix
from tests.wgsl.matrix_emulation import LANES, OTHER_SHAPES
from tests.wgsl.shader_files import SHADERS
from wgrad.autograd.selftest.case import Case, upload_inputs
from wgrad.autograd.selftest.delta_rule import matrix_rule_cases
from wgrad.autograd.selftest.matrix import decoded_cases
from wgrad.device.errors import DeviceError
from wgrad.wgsl.roofline import roofs
from wgrad.wgsl.runtime import cooperative
from wgrad.wgsl.runtime.compile import assemble
from wgrad.wgsl.runtime.cooperative_shapes import BLOCK, Shape
from wgrad.wgsl.runtime.cooperative_text import SHAPE, constant_of, in_shape

CASES = [*test_gemm_matrix.few_cases(), *decoded_cases()[:1], *test_attention_matrix.few_cases()]
LONG = re.compile("width of two tiles|prefill")  # minutes of a software driver's compiler
SETTINGS = list(product(OTHER_SHAPES[:2], LANES))
OPERATION = re.compile(r"coop_mat(\d+)x(\d+)<f(?:16|32), ([ABC])>")


def check(device: Any, monkeypatch: pytest.MonkeyPatch, case: Case, shape: Shape, lanes: int) -> None:
    monkeypatch.setattr(device, "lanes", lanes)
    monkeypatch.setattr(device, "matrix_shape", shape)
    assert_case(case, device)


@pytest.mark.all
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("case", "shape", "lanes"),
    [(case, *setting) for case in CASES for setting in (SETTINGS if not LONG.search(case.name) else SETTINGS[6:7])],
    ids=str,
)
def test_every_shape_is_within_the_limits(
    matrix_device: Any, monkeypatch: pytest.MonkeyPatch, case: Case, shape: Shape, lanes: int
) -> None:
    check(matrix_device, monkeypatch, case, shape, lanes)


@pytest.mark.usefixtures("small_tiles")
def test_one_kernel_is_within_the_limits(matrix_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take columns and then rows; all others are a sweep."""
    case = next(case for case in CASES if case.name.startswith("gemm_tt/plain/264x136x136/float16/medium"))
    check(matrix_device, monkeypatch, case, Shape(8, 16, 16), 16)


@pytest.mark.all
def test_the_roofline_multiplies_by_parts(matrix_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_device, "matrix_shape", Shape(8, 16, 16))
    found = matrix_device.download(roofs.matrix_multiply_adds(matrix_device, 1, 2))
    factors = ((np.arange(6 * 256) % 13) / 16).reshape(6, 16, 16)
    sums = 2 * sum(factors[i] @ factors[2 + j] for i in range(2) for j in range(4))
    np.testing.assert_allclose(found, np.broadcast_to(sums, found.shape), rtol=1e-6)


KERNEL = """
let a = coopLoad{0}<coop_mat16x16<f16, A>>(&left[a_at].low, a_ld);
let b = coopLoad{1}<coop_mat16x16<f16, B>>(&right[b_at], b_ld);
var c = coop_mat16x16<f32, C>();
c = coopMultiplyAdd(a, b, c);
coopStoreT(c, &sums[c_at], c_ld);
c = coopLoadT<coop_mat16x16<f32, C>>(&sums[c_at], c_ld); //@ file:7
c = coopMultiplyAdd(a, b, c);
coopStoreT(c, &sums[c_at], c_ld);
"""


def run(text: str, arrays: dict[str, np.ndarray], names: dict[str, Any]) -> None:
    """Carry the operations out, one line after another. Rows of `ld` vec4, of which `low` counts two."""

    def window(kind: str, array: str, at: str, low: str, ld: str, by_rows: str) -> np.ndarray:
        columns, rows, _ = OPERATION.search(kind).groups()  # type: ignore[union-attr]
        first = 4 * int(names[at]) * (2 if low else 1)
        row, column = np.indices((int(rows), int(columns)))
        stride = 4 * names[ld]
        return first + (row * stride + column if by_rows else column * stride + row)

    for line in text.strip().splitlines():
        code = re.sub(r"^(let|var) ", "", line.partition(" //")[0]).rstrip(";")
        name, _, value = code.partition(" = ")
        if found := re.match(r"coopLoad(T?)<(.*)>\(&(\w+)\[(\w+)\](\.low)?, (\w+)\)", value):
            by_rows, kind, array, at, low, ld = found.groups()
            names[name] = arrays[array][window(kind, array, at, low, ld, by_rows)]
            names[f"kind {name}"] = kind
        elif found := re.match(r"(coop_mat.*)\(\)", value):
            columns, rows, _ = OPERATION.search(found[1]).groups()  # type: ignore[union-attr]
            names[name], names[f"kind {name}"] = np.zeros((int(rows), int(columns))), found[1]
        elif found := re.match(r"coopMultiplyAdd\((\w+), (\w+), (\w+)\)", value):
            a, b, c = (names[word] for word in found.groups())
            assert a.shape[1] == b.shape[0] and c.shape == (a.shape[0], b.shape[1])
            names[name] = a @ b + c
        elif found := re.match(r"coopStoreT\((\w+), &(\w+)\[(\w+)\], (\w+)\)", code):
            matrix, array, at, ld = found.groups()
            arrays[array][window(names[f"kind {matrix}"], array, at, "", ld, "T")] = names[matrix]
        else:
            names[name] = eval(re.sub(r"\b(\d+)u\b", r"\1", value), {}, names)


@pytest.mark.parametrize("shape", [BLOCK, *OTHER_SHAPES], ids=str)
@pytest.mark.parametrize("by_rows", list(product(("", "T"), ("", "T"))), ids=str)
def test_parts_multiply_what_the_whole_does(shape: Shape, by_rows: tuple[str, str]) -> None:
    text = KERNEL.format(*by_rows)
    made = in_shape(text, "x".join(map(str, shape)))
    lines = made.splitlines()
    assert sum("coopMultiplyAdd" in line for line in lines) == 2 * 16**3 // (shape.m * shape.n * shape.k)
    assert {line.partition(" //")[2] for line in lines} == {"", "@ file:7"}
    rng, found = np.random.default_rng(3), []
    left, right = rng.integers(-9, 9, 2000).astype(float), rng.integers(-9, 9, 2000).astype(float)
    for one in (text, made):
        arrays = {"left": left, "right": right, "sums": np.zeros(2000)}
        run(one, arrays, {"a_at": 3, "a_ld": 10, "b_at": 5, "b_ld": 7, "c_at": 2, "c_ld": 9})
        found.append(arrays["sums"])
    assert found[0].any()
    np.testing.assert_array_equal(found[0], found[1])


def test_every_operation_of_a_shader_has_parts() -> None:
    """Whatever is unrolled or given to a part of a shader."""
    seen = 0
    for text in SHADERS.values():
        for line in re.sub(r"\$\w+", "x", text).splitlines():
            if "coop" in line.partition("//")[0] and not line.startswith("enable"):
                assert in_shape(line, "8x16x16") != line
                seen += 1
    assert seen > 40
    with pytest.raises(ValueError, match="no parts are known: c = coopNew"):
        in_shape("c = coopNew(a);", "8x8x8")


def test_every_kernel_has_the_shape_of_the_device(matrix_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_device, "matrix_shape", Shape(8, 16, 16))
    dry = matrix_device.dry_run()
    for case in [*CASES, *matrix_rule_cases()]:
        case.call(dry, upload_inputs(dry, case.inputs()))
    roofs.matrix_multiply_adds(dry, 1, 1)
    with suppress(DeviceError):  # nothing has run
        cooperative.lanes_of(dry)
    shapes: dict[str, set[Any]] = {}
    for variant in dry.variants:
        shapes.setdefault(variant.shader, set()).add(dict(variant.constants).get(SHAPE))
    cooperating = {name.removesuffix(".wgsl") for name, text in SHADERS.items() if "wgpu_cooperative_matrix" in text}
    # The delta rule's are for 16 x 16 x 16 alone.
    cooperating = {name for name in cooperating if not name.startswith("delta_rule_")}
    assert {shader for shader, found in shapes.items() if found == {"8x16x16"}} == cooperating


def test_the_shape_is_a_constant_of_the_variant() -> None:
    """16 x 16 x 16 has none: its text and its variants are those of before."""
    assert constant_of(BLOCK) == {} and constant_of(Shape(8, 16, 16)) == {SHAPE: "8x16x16"}
    source = "var c = coop_mat16x16<f32, C>();"
    assert assemble(source, {}) == source
    assert assemble(source, {SHAPE: "8x16x16"}).splitlines() == [
        "var c_0_0 = coop_mat16x8<f32, C>();",
        "var c_8_0 = coop_mat16x8<f32, C>();",
    ]
