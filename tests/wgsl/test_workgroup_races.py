"""No two invocations of a workgroup race for its memory, and every barrier is needed for that, or known not to be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.case_results import assert_case
from tests.wgsl.matrix_emulation import emulated, with_matrix_units
from tests.wgsl.shader_files import SHADERS
from tests.wgsl.workgroup_cases import BY_NAME, CASES, declared, prepare, use_small_tiles
from tests.wgsl.workgroup_races import BINDING, Noted, noted, races
from wgrad.wgsl.attention import attention_matrix
from wgrad.wgsl.attention.attention_matrix import MatrixRows
from wgrad.wgsl.runtime import compile as wgsl_compile
from wgrad.wgsl.runtime.compile import Variant, assemble

_BARRIERS = ("workgroupBarrier();", "subgroupBarrier();")
_GATES = ["delta_rule.inc.wgsl 0", "delta_rule.inc.wgsl 2"]
# Barriers without which no race is seen, by number in their file.
_UNSEEN: dict[str, list[str]] = {
    "attention": ["attention.wgsl 6"],  # those of the last keys' values come between
    "attention_decode": ["attention_decode.wgsl 4"],  # one in the loop comes between
    # A subgroup scales and loads its own rows, as it stores them next. A store in parts needs the other one.
    "attention_matrix": ["attention_matrix.inc.wgsl 2", "attention_matrix.wgsl 7"],
    "attention_matrix_dq": ["attention_matrix.inc.wgsl 2"],
    # Of those in `highest` and behind the sum of weights, others come before the next use. The last one is needed
    # beyond 65,536 tokens.
    "decoding_sample": ["decoding_sample.wgsl 2", "decoding_sample.wgsl 4", "decoding_sample.wgsl 7"],
    # Of load_gates and write_gates: gates are read in front of another one, and behind another one.
    **dict.fromkeys(("delta_rule_output", "delta_rule_scan", "delta_rule_scan_backward"), _GATES),
    **dict.fromkeys(("delta_rule_grads", "ssd_grads"), _GATES),
    "delta_rule_system": [*_GATES, "delta_rule.inc.wgsl 5"],
    "delta_rule_channels": ["delta_rule_channels.wgsl 0"],  # for more key heads than the case has
    "delta_rule_step": ["delta_rule_step.wgsl 2"],  # that of `summed` comes between
    "gemm_matrix": ["nf4.inc.wgsl 0"],  # the ranks of a LoRA, which come first, have a barrier behind them
    # The emulation reads right operands as they are multiplied, behind the next one. A GPU needs it.
    "gemm_matrix_lora": ["gemm_matrix_lora.wgsl 2"],
    # That in front of staging: behind sums over states, each invocation overwrites what itself has read.
    "selective_scan_output": ["selective_scan.inc.wgsl 0"],
    "ssd_step": ["ssd_step.wgsl 0"],  # that in front of the sum comes between
}
# Too slow to leave out each barrier: minutes a shader. bench/notes/barriers.md has what was found once.
_SLOW = {
    *(f"delta_rule_{name}_matrix" for name in ("grads", "output", "scan", "scan_backward", "system")),
    "selective_scan_grads",
}
# `make test` has a tile that is used again, a scan, and a sum in rounds; `make test-all` has every shader.
_SHADERS = [
    pytest.param(shader, marks=[] if shader in ("attention_decode", "moe_group", "reduce_rows") else pytest.mark.all)
    for shader in CASES
]
# Those whose barriers are left out in turn.
_SWEPT = [
    pytest.param(shader, marks=[] if shader == "ssd_step" else pytest.mark.all)
    for shader in CASES
    if shader not in _SLOW
]
# By part of the name.
_NOTES = {"matrix": 1 << 23, **dict.fromkeys(("delta_rule", "moe_keep", "selective_scan"), 1 << 22), "": 1 << 20}
_WITHOUT_ACCESSES = {"ssd_channels"}  # its memory is that of functions that it does not call


@dataclass
class Racing:
    """A device whose shaders note their accesses. found: races by shader; accesses: how many were noted. without: a
    shader and a line of its text, of which a barrier is left out."""

    device: Any
    noted: dict[Variant, Noted] = field(default_factory=dict)
    found: dict[str, list[str]] = field(default_factory=dict)
    accesses: Counter[str] = field(default_factory=Counter)
    without: tuple[str, str] | None = None
    forgotten: list[Any] = field(default_factory=list)  # alive, so that no other pipeline has the same handle

    def forget(self, shader: str) -> None:
        """Compile a shader anew."""
        pipelines = self.device._compiler._pipelines
        self.forgotten += [pipelines.pop(variant) for variant in list(pipelines) if variant.shader == shader]


@cache
def _racing() -> Racing:
    return Racing(with_matrix_units())


@pytest.fixture
def on(wgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> Racing:
    use_small_tiles(monkeypatch)
    on = _racing()
    on.found.clear()
    on.accesses.clear()
    plain, read_source, launch = wgsl_compile.assemble, wgsl_compile.read_source, on.device.launch
    launched: list[Variant] = []

    def read(file: str, constants: dict[str, Any], *, tagged: bool = False) -> str:
        shader, place = on.without or ("", "")
        if file != f"{shader}.wgsl":
            return read_source(file, constants, tagged=tagged)
        lines = []
        for line in read_source(file, constants, tagged=True).splitlines():
            text, tag, of = line.rpartition(" //@")
            lines.append((_without_barrier(text) if of == place else text) if tag else line)
        return "\n".join(lines) + "\n"

    def with_notes(source: str, constants: dict[str, Any]) -> str:
        text, lanes = plain(source, constants), constants.get("LANES", 32)
        on.noted[launched[-1]] = noted(emulated(text, lanes), lanes)
        return on.noted[launched[-1]].text

    def launch_and_look(
        shader: str,
        arrays: Sequence[Any],
        params: Sequence[int | float],
        groups: tuple[int, int, int],
        constants: Mapping[str, Any] | None = None,
        *,
        entry: str = "main",
        work: float = 0.0,
    ) -> None:
        launched.append(Variant(shader, entry, tuple((constants or {}).items())))
        if declared(shader):
            notes = on.device.upload(np.zeros(next(n for name, n in _NOTES.items() if name in shader), np.int32))
            arrays = [*arrays, *[None] * (BINDING - 1 - len(arrays)), notes]
        launch(shader, arrays, params, groups, constants, entry=entry, work=work)
        if declared(shader):
            taken = on.device.download(notes)
            on.found.setdefault(shader, []).extend(races(taken, on.noted[launched[-1]]))
            on.accesses[shader] += int(np.count_nonzero(taken[:-1] > 0))

    monkeypatch.setattr(wgsl_compile, "assemble", with_notes)
    monkeypatch.setattr(wgsl_compile, "read_source", read)
    monkeypatch.setattr(on.device, "launch", launch_and_look)
    return on


def _without_barrier(line: str) -> str:
    for barrier in _BARRIERS:
        line = line.replace(barrier, "")
    return line


def _barriers(shader: str, on: Racing) -> dict[str, str]:
    """The barriers of a shader's launched variants by file and number: file and line. Of those with barriers of
    subgroups where the device has them, otherwise of the others."""
    found: dict[str, str] = {}
    for constants in (dict(variant.constants) for variant in on.noted if variant.shader == shader):
        if bool(constants.get("SUBGROUP_BARRIER") or constants.get("OWN_STRIPS")) != on.device.subgroup_barrier:
            continue
        source = wgsl_compile.read_source(f"{shader}.wgsl", constants, tagged=True)
        for line in assemble(source, constants).splitlines():
            text, _, place = line.rpartition(" //@")
            if _without_barrier(text) != text:
                file, _, number = place.partition(":")
                before = SHADERS[file].splitlines()[: int(number) - 1]
                found[f"{file} {sum(_without_barrier(other) != other for other in before)}"] = place
    return found


def _run(shader: str, on: Racing, monkeypatch: pytest.MonkeyPatch, *wrong: type[Exception]) -> None:
    """Run the cases of a shader, up to the first in which it races. wrong: what they may raise."""
    if "matrix" in shader and not on.device.float16:
        pytest.skip("the device has no float16")
    prepare(shader, on.device, monkeypatch)
    for name in CASES[shader]:
        if not on.found.get(shader):
            with suppress(*wrong):
                assert_case(BY_NAME[name], on.device)
    if shader == "gemv" and not on.found.get(shader):
        with monkeypatch.context() as patch, suppress(*wrong):
            patch.setattr(on.device, "subgroups", False)
            assert_case(BY_NAME[CASES[shader][0]], on.device)


@pytest.mark.parametrize("shader", _SHADERS)
def test_no_two_invocations_race(shader: str, on: Racing, monkeypatch: pytest.MonkeyPatch) -> None:
    _run(shader, on, monkeypatch)
    assert not {name: found for name, found in on.found.items() if found}
    assert bool(on.accesses[shader]) != (shader in _WITHOUT_ACCESSES)  # by the workgroups that take notes


@pytest.mark.parametrize("shader", _SWEPT)
def test_a_missing_barrier_is_a_race(shader: str, on: Racing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each barrier is left out in turn."""
    unseen = []
    _run(shader, on, monkeypatch)
    for name, place in _barriers(shader, on).items():
        on.forget(shader)
        on.found.clear()
        on.without = shader, place
        _run(shader, on, monkeypatch, AssertionError)
        if not on.found.get(shader):
            unseen.append(name)
    on.without = None
    on.forget(shader)
    assert sorted(unseen) == _UNSEEN.get(shader, [])


@pytest.mark.parametrize(
    "shader",
    [
        "gemm_matrix_lora",
        *(pytest.param(shader, marks=pytest.mark.all) for shader in ("attention_matrix", "gemm_matrix")),
    ],
)
def test_barriers_of_subgroups_order_what_these_share(shader: str, on: Racing, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other subgroup uses what only a barrier of the subgroup orders, and each of those is needed."""
    monkeypatch.setattr(on.device, "subgroup_barrier", True)
    own = {"forward": ((0, MatrixRows(4, own_strips=True)),)}
    monkeypatch.setattr(attention_matrix, "TILES", attention_matrix.TILES | own)
    _run(shader, on, monkeypatch)
    assert not {name: found for name, found in on.found.items() if found}
    places = [place for place in _barriers(shader, on).values() if "subgroupBarrier();" in _line_at(place)]
    assert places
    for place in places:
        on.forget(shader)
        on.found.clear()
        on.without = shader, place
        _run(shader, on, monkeypatch, AssertionError)
        assert on.found.get(shader), f"no race without the barrier at {place}"
    on.without = None
    on.forget(shader)


def _line_at(place: str) -> str:
    file, _, number = place.partition(":")
    return SHADERS[file].splitlines()[int(number) - 1]
