"""Every kernel of every object that ships: the case that launches it on the emulated GPU, and the run that executed
its machine code and left a row in a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.hip.executor.device import shipped
from tests.hip.executor.operators import expert_cases
from tests.hip.executor.table import ATTENTION, TABLES, Object, digests, reason, stale
from tests.hip.test_operators import CASES, EACH_OPERATOR
from wgrad.autograd.selftest.attention import attention_case
from wgrad.autograd.selftest.case import BF16, F32, Case
from wgrad.autograd.selftest.gemm import gemm_case
from wgrad.autograd.selftest.probe import chosen_cases
from wgrad.autograd.selftest.run import call_case, check_case
from wgrad.device.formats.frozen_weight import formats
from wgrad.device.formats.gguf_quantize import ROUNDED
from wgrad.hip.attention.attention import ROUNDINGS
from wgrad.hip.attention.attention_widths import WIDTHS
from wgrad.hip.runtime.architectures import SHIPPED

# Cases of the self-test that reach what neither one case of each operator nor the self-check of `auto` does.
MORE = (
    "gemm_tt/plain/41x123x67/float32",
    "gemm_nt/row/1x123x67/float32",
    "q8_0_dequantize/plain small/37x96/float16",
    "grouped_linear/float32 rows/70x5x2x72x68/float32",
    "grouped_linear_backward/float32 rows/70x5x2x72x68/float32",
    "grouped_linear/float32 few rows/3x7x2x37x35/float32",
    "grouped_linear_backward/float32 few rows/3x7x2x37x35/float32",
    "grouped_weight_grad/float32 tiles/33x4x2x36x40/float32",
    "delta_rule/steps on a state/2x3x2x4x6x70/float32",
    "ssd/steps on a state/2x3x2x4x6x70/float32",
    *(f"round_weight/{format}/27x{3 * formats()[format].block}/float32" for format in ROUNDED),
    "fused over 1/3x37x53/float32",
    *(f"layer_norm{half}/plain/{rows}/float32>float32" for half in ("", "_backward") for rows in ("3x1003", "1x2052")),
)
# Sources that use every line which only gfx90a or gfx1201 has: the headers of `gemm` are those of all matmuls.
MATRIX = {"gemm", *ATTENTION}
# Run on every architecture of `hip_device` by other tests.
ELSEWHERE = {case.name for case in (*CASES, *chosen_cases())}


def with_rounding(case: Case, mode: str) -> Case:
    """Attention by the kernels that round probabilities so: to one of bfloat16's last places."""

    def call(device: Any, x: Any) -> Any:
        before, device.attention_rounding = getattr(device, "attention_rounding", ""), mode
        try:
            return case.call(device, x)
        finally:
            device.attention_rounding = before

    return replace(case, name=f"{case.name}/{mode}", call=call, ulps=2.0**15)


@cache
def pool() -> list[Case]:
    """Return all cases that may run, beginning with one for each operator."""
    named = {case.name: case for case in CASES}
    found = [*EACH_OPERATOR, *chosen_cases(), *(named[name] for name in MORE), *expert_cases()]
    found.append(gemm_case("split", 40, 136, 72, F32, BF16, dtype=F32))
    for width in WIDTHS:
        case = attention_case("rounding", (1, 37, 2, 1, width), BF16)
        found += [with_rounding(case, mode) for mode in ROUNDINGS[1:]]
    return list({case.name: case for case in found}.values())


def kernels(architecture: str) -> set[tuple[str, str]]:
    """(source, kernel) of all objects of an architecture."""
    return {(made.source, name) for made in objects(architecture) for name in shipped(*reversed(made)).kernels}


def objects(architecture: str) -> Iterator[Object]:
    return (made for made in digests() if made.architecture == architecture)


def launches(device: Any, case: Case) -> set[tuple[str, str]]:
    dry = device.dry_run()
    call_case(case, dry)
    return set(dry.kernels)


def chosen(device: Any) -> tuple[list[tuple[Case, set[str]]], set[tuple[str, str]]]:
    """Choose cases of the pool: one for each operator, and each that launches a new kernel.

    Returns the cases with the sources of their kernels, and all kernels that they launch.
    """
    found: list[tuple[Case, set[str]]] = []
    reached: set[tuple[str, str]] = set()
    for case in pool():
        launched = launches(device, case)
        if launched - reached or case in EACH_OPERATOR:
            found.append((case, {source for source, _ in launched}))
            reached |= launched
    return found, reached


def test_kernels_of_gfx950_are_those_of_gfx942() -> None:
    """The emulated GPU runs the same text for both: it has no GPU_CDNA4."""
    assert kernels("gfx950") == kernels("gfx942")


@pytest.mark.parametrize("architecture", [a for a in SHIPPED if a != "gfx950"])
def test_every_kernel_is_launched(emulator: Any, architecture: str, pytestconfig: pytest.Config) -> None:
    """By a case whose result is right. What other tests run on this architecture is not run again; and of gfx90a and
    gfx1201 sources whose lines are all run in others, or on the same wave size, only with --all."""
    device = emulator.device(architecture)
    cases, reached = chosen(device)
    assert kernels(architecture) - reached == set()
    assert reached - kernels(architecture) == set()
    if architecture in ("gfx942", "gfx1100"):
        run = [case for case, _ in cases if case.name not in ELSEWHERE]
    else:
        run = [case for case, sources in cases if sources & MATRIX or pytestconfig.getoption("--all")]
    wrong = [result for result in (check_case(case, device) for case in run) if not result.ok]
    assert wrong == []


def test_every_kernel_is_executed() -> None:
    """It has a row, made by executing it. Objects that have changed since are left to `make hip-tables`."""
    executed: set[tuple[str, str, str]] = set()
    older: set[Object] = set()
    for name in ("hip_executed", "hip_isa", "hip_attention"):
        rows = TABLES[name].rows()
        executed |= {(r["arch"], r["source"], r["kernel"]) for r in rows if name == "hip_executed" or "error" in r}
        older |= set(stale(TABLES[name], rows))
    wanted = {(a, *kernel) for a in SHIPPED for kernel in kernels(a)}
    assert {cell for cell in wanted - executed if Object(*cell[:2]) not in older} == set()
    if older:
        pytest.skip(reason("an executed table", sorted(older)))
