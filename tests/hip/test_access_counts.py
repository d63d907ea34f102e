"""LDS bank conflicts and uncoalesced accesses: the counter finds those of probes, and our kernels keep their counts."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from tests.autograd.norms import NORMS
from tests.hip.executor import accesses
from tests.hip.executor.accesses import DTYPES, FAMILIES, as_row, count
from tests.hip.executor.table import COMMAND, TABLES, is_current, reason, stale
from wgrad.device.errors import DeviceLost

PROBE = """
#include "gpu.hpp"
using namespace gpu;
extern "C" GPU_KERNEL(64) void lds_words(float* y, u32 stride) {
  GPU_SHARED(float, memory, 3072);
  for (u32 i = thread(); i < 3072; i += 64) memory[i] = 1.f;
  barrier();
  y[thread()] = memory[lane() * stride];
}
extern "C" GPU_KERNEL(64) void lds_wide(float* y, u32 stride) {
  GPU_SHARED(u32x4, memory, 512);
  for (u32 i = thread(); i < 512; i += 64) store16(memory + i, u32x4{i, i, i, i});
  barrier();
  store16(y + thread() * 4, load16(memory + thread() * stride / 4 % 512));
}
extern "C" GPU_KERNEL(64) void lds_pairs(float* y) {
  GPU_SHARED(u32x4, memory, 512);
  u32 l = thread(), four = l / 4 % 8;  // of each 32 lanes: 0 and 5 read one half of the banks, 1 and 4, ...
  u32 half_of = four < 4 ? 0 : 1, at = l % 4 + 4 * half_of + 8 * (l / 4);
  store16(memory + at, u32x4{l, l, l, l});
  barrier();
  store16(y + l * 4, load16(memory + at));
}
extern "C" GPU_KERNEL(64) void global_words(const float* x, float* y, u32 stride, u32 shift) {
  y[thread()] = x[thread() * stride + shift];
}
extern "C" GPU_KERNEL(64) void global_wide(const float* x, float* y) {
  store16(y + thread() * 4, load16(x + thread() * 4));
}
extern "C" GPU_KERNEL(64) void global_loop(const float* x, float* y) {
  float sum = 0.f;
  for (u32 i = 0; i <= thread() % 3; i++) sum += x[i * 64 + thread()];
  y[thread()] = sum;
}
extern "C" GPU_KERNEL(64) void lines_twice(const float* x, float* y, u32 n) {
  float sum = 0.f;
  for (u32 i = 0; i < 2 * n; i++) sum += x[i % n * 32 + thread() % 32];
  y[thread()] = sum;
}
extern "C" GPU_KERNEL(64) void line_often(const float* x, float* y, u32 n) {
  float sum = 0.f;
  for (u32 i = 0; i < n; i++) sum += x[i % 2 * i * 32 + thread() % 32];
  y[thread()] = sum;
}
extern "C" GPU_KERNEL(64) void race(float* y, u32 what) {
  GPU_SHARED(float, memory, 128);
  u32 other = (thread() + GPU_WAVE) % 64, t = thread();
  if (what == 0) memory[t] = 1.f, y[t] = memory[other];              // written by one, read by the other
  if (what == 1) y[t] = memory[other], memory[t] = 1.f;              // the other way round
  if (what == 2) memory[t % 32] = 1.f;                               // written by both
  if (what == 3) memory[t] = 1.f, barrier(), y[t] = memory[other], barrier(), memory[t] = 2.f;
  if (what == 4) memory[t] = 1.f, y[t] = memory[t ^ 1], y[t] += memory[64];  // its own, and what nobody writes
}
extern "C" GPU_KERNEL(64) void race_outside(float* y, u32 what) {
  u32 other = (thread() + GPU_WAVE) % 64, t = thread();
  if (what == 0) y[t] = 1.f, y[t + 64] = y[other];
  if (what == 1) y[t] = 1.f, local_barrier(), y[t + 64] = y[other];  // orders LDS alone
  if (what == 2) y[t] = 1.f, lds_barrier(), y[other] = 2.f;
  if (what == 3) y[t] = 1.f, barrier(), y[t + 64] = y[other], local_barrier(), y[t] = y[t + 64];
  if (what == 4) y[t] = 1.f, y[t + 64] = y[t ^ 1] + y[128];
}
extern "C" GPU_KERNEL(64) void spill(float* y, u32 n) {
  float kept[64];
  for (u32 i = 0; i < 64; i++) kept[(i * n + thread()) % 64] = float(i);
  y[thread()] = kept[(n * 7 + thread()) % 64];
}
"""
TABLE = TABLES["hip_access_counts"]
COMPUTE_BOUND = ("gemm", "gemv", "attention")
# Cache lines touched, in the least that the same bytes need. float32 goes in eights of a work-item, which are two
# accesses of 16 bytes at steps of 32: each line is touched twice, and read from memory once.
MOST_LINES = {"float32": 2.05, "float16": 1.05}
NORM_LINES = {"": 1.7, "_backward": 1.5, "_row16": 1.45}  # up to two float32 weights
MOST_LINES_OF = {
    "elementwise": 3.0,  # bias and mask are read one by one
    **{f"{norm}{kind}": most for norm in NORMS for kind, most in NORM_LINES.items()},
    "rope": 2.0,  # a half of a head is half a line
    "rope_append": 2.0,
    "cross_entropy": 2.15,  # the logits are float32; the wave at a row's end has few lanes
    "embedding_backward": 1.6,  # the gradient is float32
    "embedding_chains": 4.0,  # a search in the ids
    "nf4_quantize": 3.85,  # a work-item takes a piece of 16 bytes of a line or more, one access after another
    "nf4_dequantize": 3.6,
    "round_q4_k": 7.2,  # a work-item takes 128 bytes in eight accesses, then searches for their scale
    "round_q6_k": 3.5,  # and 64 bytes in four
    "nf4_nest": 3.5,  # a search in 255 thresholds
    "grad_norm": 2.0,  # float32
    "sample": 2.2,  # float32
}


@pytest.fixture(scope="module")
def counting(emulator: Any) -> Any:
    """counting(architecture): a device whose kernels count, one for all tests."""
    return cache(partial(accesses.counting, emulator))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("architecture", ["gfx942", "gfx1100"])
def test_counts_are_those_of_the_table(
    emulator: Any, counting: Any, architecture: str, family: Any, dtype: str
) -> None:
    """Compare each kernel's launches, LDS cycles and lines of global memory with the least possible ones. The
    bars hold for every kernel, a table's row for those whose code object it was made from."""
    found = count(emulator, counting(architecture), family, dtype)
    for name, counts in found.items():
        cycles, least_cycles = counts.total("lds")
        assert cycles == least_cycles, f"{name}: {cycles} LDS cycles for {least_cycles}"
        if not name.startswith(COMPUTE_BOUND):
            check_coalesced(name, counts, dtype)
    rows = [r for r in TABLE.rows() if (r["arch"], r["family"], r["dtype"]) == (architecture, family.__name__, dtype)]
    current = {r["kernel"]: {k: r[k] for k in ("kernel", "launches", "lds", "lines")} for r in rows if is_current(r)}
    wanted = {name: as_row(name, counts) for name, counts in found.items() if name in current}
    assert current == wanted, f"where this is meant: {COMMAND} FLAGS='--all --table {TABLE.name}'"
    older = {r["source"] for r in rows if not is_current(r)}
    if objects := [o for o in stale(TABLE, TABLE.rows()) if o.architecture == architecture and o.source in older]:
        pytest.skip(reason(TABLE.name, objects))
    assert found.keys() == current.keys()


def check_coalesced(name: str, counts: Any, dtype: str) -> None:
    """The bar of a memory-bound kernel."""
    lines, least = counts.total("global")
    most = max(MOST_LINES[dtype], MOST_LINES_OF.get(name, 0.0))
    assert lines <= most * least, f"{name}: {lines} lines for {least}"


# ---- the counter itself --------------------------------------------------------------------------
@pytest.fixture(params=["gfx942", "gfx1100"])
def probe(emulator: Any, request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """probe(kernel, arguments): the sites of one launch of a kernel above."""
    (tmp_path / "probe.hip").write_text(PROBE)
    device = emulator.counting(request.param, tmp_path)
    x, y = device.zeros((4096,)), device.zeros((4096,))

    def launch(
        kernel: str, *numbers: int, reads: bool = False, l1: int = 256
    ) -> dict[tuple[str, str], tuple[int, int, int]]:
        arguments = [x, y, *numbers] if reads else [y, *numbers]
        found = emulator.count(lambda: device.launch("probe", kernel, arguments, (1, 1, 1), threads=64), l1=l1)
        launch.fetched = found[kernel].fetched  # type: ignore[attr-defined]
        return {(s.memory, s.direction): (s.accesses, s.cost, s.least) for s in found[kernel].sites}

    launch.waves = 64 // device.wave  # type: ignore[attr-defined]
    launch.cdna = device.wave == 64  # type: ignore[attr-defined]
    return launch


@pytest.mark.parametrize(("stride", "ways"), [(1, 1), (2, 2), (4, 4), (32, 32), (33, 1), (48, 16), (0, 1)])
def test_bank_conflicts_of_words_are_counted(probe: Any, stride: int, ways: int) -> None:
    """A step of 32 words: 32 lanes in one bank. A step of 0: one word for all, no conflict."""
    assert probe("lds_words", stride)["lds", "load"] == (probe.waves, 2 * ways, 2)


@pytest.mark.parametrize(("stride", "ways"), [(4, 1), (8, 2), (16, 4), (20, 1), (32, 8)])
def test_bank_conflicts_of_128_bits_are_counted(probe: Any, stride: int, ways: int) -> None:
    """Eight lanes at a time; 20 words is the padded row of 16."""
    assert probe("lds_wide", stride)["lds", "load"] == (probe.waves, 8 * ways, 8)


def test_cdna_takes_128_bit_reads_of_lanes_that_are_not_neighbors(probe: Any) -> None:
    """Lanes 0-3 read where lanes 4-7 do, and 16-19 where 20-23 do: a conflict for groups of neighbors alone."""
    found = probe("lds_pairs")
    assert found["lds", "load"][1:] == ((8, 8) if probe.cdna else (16, 8))
    assert found["lds", "store"][1] == 16  # stores go by neighbors everywhere


@pytest.mark.parametrize(("stride", "shift", "lines"), [(1, 0, 2), (1, 1, 0), (2, 0, 4), (32, 0, 64), (0, 0, 0)])
def test_lines_of_global_memory_are_counted(probe: Any, stride: int, shift: int, lines: int) -> None:
    """64 words in two lines of 128 bytes; one element on, a line more for each wave; a step of 32, a line a lane."""
    wanted = {(1, 1): 2 + probe.waves, (0, 0): probe.waves}.get((stride, shift), lines)
    accesses, cost, least = probe("global_words", stride, shift, reads=True)["global", "load"]
    assert (accesses, cost, least) == (probe.waves, wanted, 2 if stride else probe.waves)


def test_lines_of_128_bits_are_counted_once(probe: Any) -> None:
    for direction in ("load", "store"):
        assert probe("global_wide", reads=True)["global", direction] == (probe.waves, 8, 8)


@pytest.mark.parametrize(("lines", "times"), [(8, 1), (9, 2)])
def test_l1_keeps_what_was_read_last(probe: Any, lines: int, times: int) -> None:
    """Read twice in the same order through an L1 of 8 lines; each wave finds what the one before has left."""
    probe("lines_twice", lines, reads=True, l1=8)
    assert probe.fetched == (lines if times == 1 else probe.waves * lines * times)
    probe("global_wide", reads=True)
    assert probe.fetched == 8  # stores fetch nothing
    probe("line_often", 8, reads=True, l1=2)  # lines 0, 1, 0, 3, 0, 5, 0, 7
    assert probe.fetched == 5 + 4 * (probe.waves - 1)


def test_lanes_that_leave_a_loop_are_not_mixed_up(probe: Any) -> None:
    """Lane l goes round l % 3 + 1 times: each round is one access of the lanes that are still there."""
    assert probe("global_loop", reads=True)["global", "load"][0] == 3 * probe.waves


@pytest.mark.parametrize("what", range(5))
@pytest.mark.parametrize(("kernel", "memory"), [("race", "LDS"), ("race_outside", "global memory")])
def test_waves_that_share_memory_are_found(
    emulator: Any, probe: Any, blocking: None, kernel: str, memory: str, what: int
) -> None:
    """By epochs between barriers, whichever wave runs first. gfx942 has one wave here, whose lanes are in order."""
    if what > 2 or probe.waves == 1:
        probe(kernel, what)
    else:
        with pytest.raises(DeviceLost):
            probe(kernel, what)
        assert f"two waves use the same bytes of {memory} between two barriers" in emulator.last_failure
        emulator.clear()


def test_registers_are_not_counted(probe: Any) -> None:
    assert set(probe("spill", 3)) == {("global", "store")}
