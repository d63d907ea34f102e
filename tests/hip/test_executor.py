"""The executor's own parts, without tinygrad: instructions carried out in C, counts of instructions, the model."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from tests.hip.executor import machine
from tests.hip.executor.code_object import CodeObject, ExecutorError, Instruction
from tests.hip.executor.instructions import dpp_lanes, override
from tests.hip.executor.isa import access, branch_target, hot_loop, widths
from tests.hip.executor.memory import Guarded
from tests.hip.executor.numbers import encode
from tests.hip.executor.occupancy import waves_by_registers, waves_that_fit
from tests.hip.executor.schedule import simulate
from tests.tools import CLANG
from wgrad.device.errors import DeviceError

needs_compiler = CLANG.needed


class Wave:
    """Registers and LDS of one wave, and instructions of machine/*.c carried out on them."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.scalars = np.zeros(320, np.uint32)
        self.scalars[machine.EXEC : machine.EXEC + lanes // 32] = 0xFFFFFFFF
        self.vectors = np.zeros((256, lanes), np.uint32)
        self.accumulators = np.zeros((256, lanes), np.uint32)
        self.lds = np.arange(256, dtype=np.uint32)
        self._buffers = (ctypes.c_uint64 * machine.BUFFERS)()
        arrays = {machine.SCALARS: self.scalars, machine.VECTORS: self.vectors, machine.LDS: self.lds,
                  machine.ACCUMULATORS: self.accumulators}  # fmt: skip
        for at, array in arrays.items():
            self._buffers[at] = array.ctypes.data

    def execute(self, text: str, low: int = 0, high: int = 0, architecture: str = "gfx942") -> int:
        """Execute an instruction by the C function and return its output. low, high: words of the instruction."""
        found = override(Instruction(0, text, 8), (low, high), architecture, self.lanes, self.lds.nbytes)
        assert found is not None
        return int(machine.library()[found[0]](self._buffers, ctypes.byref(found[1])))


def words(*registers: int) -> tuple[int, int]:
    """The words of a matrix instruction: d, a, b, c are VGPRs."""
    d, a, b, c = registers
    return d, (256 + a) | (256 + b) << 9 | (256 + c) << 18


@needs_compiler
@pytest.mark.parametrize(
    ("side", "depth", "architecture"), [(16, 16, "gfx942"), (32, 8, "gfx942"), (16, 32, "gfx950"), (32, 16, "gfx950")]
)
def test_mfma_is_a_product(side: int, depth: int, architecture: str) -> None:
    """Lane l holds four elements along k (gfx950: eight) of row l % side; results of 16: row 4 (l / 16) + r; of 32:
    groups of four."""
    rng, wave = np.random.default_rng(0), Wave(64)
    a, b = (rng.standard_normal((side, depth)).astype(np.float16) for _ in range(2))
    count = side * depth // 128  # of a lane's words
    for at, x in ((8, a), (16, b)):
        packed = x.reshape(side, -1, count, 2).view(np.uint32)[..., 0]  # [side, group, word]
        wave.vectors[at : at + count] = packed.transpose(2, 1, 0).reshape(count, 64)
    text = f"v_mfma_f32_{side}x{side}x{depth}_f16 v[32:47]"
    assert wave.execute(text, *words(32, 8, 16, 64), architecture) == 0
    if architecture == "gfx950":
        with pytest.raises(ExecutorError, match="does not know this form"):
            wave.execute(text, *words(32, 8, 16, 64), "gfx942")
    found = np.zeros((side, side))
    for r in range(side * side // 64):
        for lane in range(64):
            row = 4 * (lane // 16) + r if side == 16 else 8 * (r // 4) + 4 * (lane // 32) + r % 4
            found[row, lane % side] = wave.vectors[32 + r].view(np.float32)[lane]
    np.testing.assert_allclose(found, a.astype(np.float64) @ b.astype(np.float64).T, rtol=1e-6)
    assert wave.scalars[machine.PC] == 8


@needs_compiler
def test_wmma_wants_both_halves_and_all_lanes() -> None:
    wave, text = Wave(32), "v_wmma_f32_16x16x16_f16 v[32:39]"
    wave.vectors[8:24] = 0x3C003C00  # ones
    assert wave.execute(text, *words(32, 8, 16, 64), "gfx1100") == 0
    assert (wave.vectors[32:40].view(np.float32) == 16).all()
    wave.vectors[9, 20] = 0
    assert "lanes 16-31" in machine.ERRORS[wave.execute(text, *words(32, 8, 16, 64), "gfx1100")]
    wave.scalars[machine.EXEC] = 0xFFFF
    assert "switched off" in machine.ERRORS[wave.execute(text, *words(32, 8, 16, 64), "gfx1100")]


@needs_compiler
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_wmma_of_rdna4_is_a_product(kind: str) -> None:
    """Lane l holds eight elements along k, from 8 (l / 16) on, of row l % 16, and results of rows 8 (l / 16) + r."""
    rng, wave = np.random.default_rng(0), Wave(32)
    a, b = (encode(rng.standard_normal((16, 16)), kind) for _ in range(2))
    c = rng.standard_normal((2, 8, 16)).astype(np.float32)  # [l / 16, r, l % 16]
    for at, (stored, _) in ((8, a), (16, b)):
        packed = stored.view(np.uint16).reshape(16, 2, 4, 2).view(np.uint32)[..., 0]  # [row, half, word]
        wave.vectors[at : at + 4] = packed.transpose(2, 1, 0).reshape(4, 32)
    wave.vectors[64:72] = c.transpose(1, 0, 2).reshape(8, 32).view(np.uint32)
    assert wave.execute(f"v_wmma_f32_16x16x16_{kind} v[32:39]", *words(32, 8, 16, 64), "gfx1201") == 0
    found = wave.vectors[32:40].view(np.float32).reshape(8, 2, 16).transpose(1, 0, 2).reshape(16, 16)
    np.testing.assert_allclose(found, a[1] @ b[1].T + c.reshape(16, 16), rtol=1e-6, atol=1e-6)
    wave.scalars[machine.EXEC] = 0xFFFF
    said = wave.execute(f"v_wmma_f32_16x16x16_{kind} v[32:39]", *words(32, 8, 16, 64), "gfx1201")
    assert "switched off" in machine.ERRORS[said]


@needs_compiler
def test_a_buffer_ends_where_its_descriptor_says() -> None:
    """Elements beyond it read as zero and are not written."""
    wave, data = Wave(64), np.arange(1, 257, dtype=np.uint32)
    wave.scalars[4:8] = data.ctypes.data & 0xFFFFFFFF, data.ctypes.data >> 32, 5 * 4, 0
    wave.vectors[1] = np.arange(64) * 16
    assert wave.execute("buffer_load_dwordx4 v[2:5], v1, s[4:7], 0 offen") == 0
    np.testing.assert_array_equal(wave.vectors[2:6, :3].T, [[1, 2, 3, 4], [5, 0, 0, 0], [0, 0, 0, 0]])
    wave.vectors[2:6] = 9
    assert wave.execute("buffer_store_dwordx4 v[2:5], v1, s[4:7], 0 offen") == 0
    np.testing.assert_array_equal(data[:7], [9, 9, 9, 9, 9, 6, 7])
    wave.scalars[5] |= 16 << 16  # a stride
    assert "stride" in machine.ERRORS[wave.execute("buffer_load_dwordx2 v[2:3], off, s[4:7], 0")]


@needs_compiler
def test_lds_loads_of_lanes_that_are_off_are_not_made() -> None:
    wave = Wave(64)
    wave.vectors[1] = 0xFFFFFF00
    wave.vectors[1, :2] = 8, 16
    wave.scalars[machine.EXEC : machine.EXEC + 2] = 3, 0
    assert wave.execute("ds_read2_b32 v[2:3], v1 offset1:1", 0x0100, 2 << 24 | 1) == 0
    np.testing.assert_array_equal(wave.vectors[2:4, :3], [[2, 4, 0], [3, 5, 0]])
    wave.scalars[machine.EXEC] = 7
    assert "outside the work-group's LDS" in machine.ERRORS[wave.execute("ds_read_b32 v2, v1", 0, 2 << 24 | 1)]


@needs_compiler
def test_accumulators_are_stored_to_lds() -> None:
    """Active lanes alone store; tinygrad's emulator would take the vector registers of the same numbers."""
    wave = Wave(64)
    wave.accumulators[5], wave.accumulators[9], wave.vectors[5] = np.arange(64) + 1000, np.arange(64) + 2000, 7
    wave.vectors[1] = np.arange(64) * 4
    wave.scalars[machine.EXEC : machine.EXEC + 2] = 3, 0
    assert wave.execute("ds_write_b32 v1, a5 offset:16", 1 << 25 | 16, 5 << 8 | 1) == 0
    np.testing.assert_array_equal(wave.lds[:8], [0, 1, 2, 3, 1000, 1001, 6, 7])
    assert wave.execute("ds_write2st64_b32 v1, a5, a9 offset1:1", 1 << 25 | 1 << 8, 9 << 16 | 5 << 8 | 1) == 0
    np.testing.assert_array_equal(wave.lds[[0, 1, 2, 64, 65, 66]], [1000, 1001, 2, 2000, 2001, 66])
    wave.vectors[1] = 1024
    assert "outside the work-group's LDS" in machine.ERRORS[wave.execute("ds_write_b32 v1, a5", 1 << 25, 5 << 8 | 1)]
    with pytest.raises(ExecutorError, match="does not know this form"):
        wave.execute("ds_write_b8 v1, a5", 1 << 25, 5 << 8 | 1)


@needs_compiler
@pytest.mark.parametrize("lanes", [64, 32])
def test_bpermute_ignores_the_bits_above_a_lanes_number(lanes: int) -> None:
    """And what is off gives 0 to others and keeps its own."""
    wave = Wave(lanes)
    wave.vectors[1] = np.arange(lanes) * 0x01000104  # lane (l + offset / 4) of lanes, with bits above and below
    wave.vectors[2], wave.vectors[3] = np.arange(lanes) + 100, 7
    wave.scalars[machine.EXEC] = 0xFFFFFFFE
    assert wave.execute("ds_bpermute_b32 v3, v1, v2 offset:8", 8, 3 << 24 | 2 << 8 | 1) == 0
    wanted = [100 + l if l else 0 for l in (np.arange(lanes) * 0x01000104 + 8 >> 2) % lanes]
    np.testing.assert_array_equal(wave.vectors[3], [7, *wanted[1:]])


@needs_compiler
def test_float16_is_converted_above_v127_on_cdna() -> None:
    wave, x = Wave(64), np.linspace(-70000, 70000, 64).astype(np.float32)
    wave.vectors[1] = x.view(np.uint32)
    assert wave.execute("v_cvt_f16_f32_e32 v200, v1", 200 << 17 | 257) == 0
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
    np.testing.assert_array_equal(wave.vectors[200], half.view(np.uint16))
    assert wave.execute("v_cvt_f32_f16_e32 v3, v200", 3 << 17 | 256 + 200) == 0
    np.testing.assert_array_equal(wave.vectors[3].view(np.float32), half.astype(np.float32))


@needs_compiler
def test_pairs_of_float16_are_rounded_to_nearest() -> None:
    """The second goes into the upper half; lanes that are off keep what they have."""
    wave, rng = Wave(64), np.random.default_rng(0)
    x, y = (rng.standard_normal(64).astype(np.float32) * 10.0 ** rng.integers(-8, 5, 64) for _ in range(2))
    x, y = x.astype(np.float32), y.astype(np.float32)
    wave.vectors[1], wave.vectors[2], wave.vectors[200] = x.view(np.uint32), y.view(np.uint32), 7
    wave.scalars[machine.EXEC] = 0xFFFFFFFE
    assert wave.execute("v_cvt_pk_f16_f32 v200, v1, v2", 200, (256 + 2) << 9 | 256 + 1, "gfx950") == 0
    with np.errstate(over="ignore"):
        low, high = (v.astype(np.float16).view(np.uint16).astype(np.uint32) for v in (x, y))
    np.testing.assert_array_equal(wave.vectors[200], [7, *(low | high << 16)[1:]])
    with pytest.raises(ExecutorError, match="does not know this form"):
        wave.execute("v_cvt_pk_f16_f32 v0, -v1, v2", 0, 1 << 29 | (256 + 2) << 9 | 256 + 1, "gfx950")


@pytest.mark.parametrize(
    "text",
    ["v_mfma_f32_16x16x8_xf32 v[0:3]", "v_mfma_i32_16x16x32_i8 v[0:3]", "global_atomic_add v0, v1, s[0:1]",
     "buffer_load_dword v0, v1, s[0:3], 0 idxen", "flat_load_dword v0, v[1:2]", "scratch_load_dword v0, off, s0",
     "ds_swizzle_b32 v0, v1"],
)  # fmt: skip
def test_forms_that_nobody_wrote_are_refused(text: str) -> None:
    with pytest.raises(ExecutorError, match="add it to tests/hip/executor/instructions.py"):
        override(Instruction(0, text, 8), (0, 0), "gfx942", 64, 1024)


def test_dpp_controls_choose_their_lanes() -> None:
    assert dpp_lanes(0xB1, 32, 15, 15)[0][:4] == [1, 0, 3, 2]  # quad_perm:[1,0,3,2]
    assert dpp_lanes(0x140, 32, 15, 15)[0][:16] == list(range(15, -1, -1))  # row_mirror
    assert dpp_lanes(0x111, 32, 15, 15)[0][:3] == [-1, 0, 1]  # row_shr:1
    assert dpp_lanes(0x142, 64, 0xA, 15)[1][15:17] == [False, True]  # row_mask leaves out rows 0 and 2
    with pytest.raises(ExecutorError, match="0x142"):
        dpp_lanes(0x142, 32, 15, 15)


def test_guards_notice_a_write_behind_the_end() -> None:
    memory = Guarded(20, fill=7)
    assert memory.address % 16 == 0 and memory.view().tolist() == [7] * 20 and memory.untouched()
    ctypes.memset(memory.address + 20, 0, 1)
    assert not memory.untouched() and memory.holds(memory.address) and not memory.holds(8)
    memory.free()


# ---- counts and the model ----------------------------------------------------------------------------
def program(*texts: str) -> list[Instruction]:
    return [Instruction(4 * n, text, 4) for n, text in enumerate(texts)]


def test_widths_and_the_hot_loop_are_found() -> None:
    found = program(
        "global_load_dwordx4 v[0:3], v4, s[0:1]", "v_mfma_f32_16x16x16_f16 a[0:3], v[0:1], v[2:3], a[0:3]",
        "ds_read2_b64 v[0:3], v4", "s_cbranch_scc1 65532", "global_store_short v4, v0, s[0:1]", "s_endpgm",
    )  # fmt: skip
    assert branch_target(found[3]) == 0
    assert widths(found) == {"global_load": {"global:128": 1}, "global_store": {"global:16": 1}, "ds_read": {"2x64": 1}}
    assert hot_loop(found) == found[:4] and hot_loop(found[4:]) == []
    assert access("buffer_load_dwordx2") == ("load", 64) and access("ds_read_b32") is None


MFMA = "v_mfma_f32_16x16x16_f16 a[{0}:{1}], v[0:1], v[2:3], a[{0}:{1}]"


def busy(waves: int, *texts: str, rounds: int = 64, latency: int = 600, arch: str = "gfx942") -> float:
    slots, matrix = simulate(arch, 64, [list(texts) * rounds] * waves, latency)
    return matrix / slots


def test_matrix_instructions_that_do_not_wait_keep_the_unit_busy() -> None:
    """4 slots each at 2,048 FLOP a clock; the next but three depends on the first."""
    free = [MFMA.format(n, n + 3) for n in (0, 4, 8, 12)]
    assert busy(1, *free) > 0.98
    assert busy(1, *free, arch="gfx90a") > 0.98


def test_another_wave_hides_what_one_waits_for() -> None:
    wait = ["global_load_dwordx4 v[0:3], v4, s[0:1]", "s_waitcnt vmcnt(0)", *(MFMA.format(n, n + 3) for n in (0, 4))]
    one, two = busy(1, *wait), busy(2, *wait)
    assert one < 0.1 and two == pytest.approx(2 * one, rel=0.05)
    assert busy(1, *wait, latency=300) > 1.7 * one


def test_waits_count_what_is_outstanding() -> None:
    """Waiting for all but the last load hides it."""
    load = "global_load_dwordx4 v[{0}:{1}], v4, s[0:1]"
    one = [load.format(8, 11), "s_waitcnt vmcnt({})", MFMA.format(0, 3)]
    assert busy(1, *(t.format(1) for t in one)) > 1.5 * busy(1, *(t.format(0) for t in one))


@pytest.mark.parametrize(
    "arch, lanes, text, l1, slots",
    [
        ("gfx942", 64, "global_load_dwordx4 v[0:3], v4, s[0:1]", False, 4),  # of its SIMD's way to L1
        ("gfx942", 64, "global_load_dwordx4 v[0:3], v4, s[0:1]", True, 16),  # 1,024 bytes, 4 SIMDs, 64 a clock
        ("gfx1100", 32, "global_load_b128 v[0:3], v4, s[0:1]", True, 16),  # 512 bytes, 2 SIMDs
        ("gfx942", 64, "ds_read_b128 v[0:3], v4", False, 8),  # 128 a clock
        ("gfx942", 64, "ds_read_b128 v[0:3], v4", True, 8),
    ],
)
def test_simds_share_lds_and_l1(arch: str, lanes: int, text: str, l1: bool, slots: int) -> None:
    short, long = (simulate(arch, lanes, [[text] * count], 600, l1=l1)[0] for count in (200, 600))
    assert long - short == 400 * slots


def test_l1_waits_for_l2() -> None:
    """L1's reads from L2 are counted where they take longer than its own answers: 53.9 bytes per clock next to 64."""

    def clocks(text: str, fetched: float) -> float:
        short, long = (simulate("gfx942", 64, [[text] * n], 600, l1=True, fetched=fetched)[0] for n in (200, 600))
        return (long - short) / 400

    load, store = "global_load_dwordx4 v[0:3], v4, s[0:1]", "global_store_dwordx4 v4, v[0:3], s[0:1]"
    assert clocks(load, 512) == 16 and clocks(load, 2048) == pytest.approx(38, abs=0.1)
    assert clocks(store, 2048) == 16


def test_a_barrier_waits_for_every_wave() -> None:
    slow = ["v_exp_f32 v1, v1"] * 50
    together, _ = simulate("gfx942", 64, [[*slow, "s_barrier", "s_endpgm"], ["s_barrier", *slow, "s_endpgm"]], 600)
    alone, _ = simulate("gfx942", 64, [[*slow, "s_barrier", "s_endpgm"]], 600)
    assert together > 1.9 * alone


def test_a_barrier_is_of_one_work_group() -> None:
    wait = ["global_load_dwordx4 v[0:3], v4, s[0:1]", "s_waitcnt vmcnt(0)", "v_mov_b32 v0, v1"]
    programs = [["s_barrier", *wait]] * 2 + [[*wait, "s_barrier"]] * 2
    one, two = (simulate("gfx942", 64, programs, 600, groups=groups)[0] for groups in (1, 2))
    assert 150 <= two < 170 and 300 <= one < 320


def test_waits_of_gfx12() -> None:
    """A counter each, or two in one number; the barrier is two instructions."""
    load, read = "global_load_b128 v[0:3], v4, s[0:1]", "ds_load_b128 v[8:11], v12"

    def slots(*texts: str) -> int:
        return simulate("gfx1201", 32, [texts], 600)[0]

    assert slots(load, "s_wait_loadcnt 0x0", "v_mov_b32 v0, v1") >= 600 > slots(load, "v_mov_b32 v0, v1")
    assert slots(load, "s_wait_loadcnt 0x1", "v_mov_b32 v0, v1") < 100
    assert 100 <= slots(read, load, "s_wait_dscnt 0x0", "v_mov_b32 v0, v1") < 200
    assert slots(read, load, "s_wait_loadcnt_dscnt 0x3f00", "v_mov_b32 v0, v1") < 200
    assert slots(read, load, "s_wait_loadcnt_dscnt 0x0", "v_mov_b32 v0, v1") >= 600
    waiting = [load, "s_wait_loadcnt 0x0", "s_barrier_signal -1", "s_barrier_wait -1", "v_mov_b32 v0, v1"]
    assert simulate("gfx1201", 32, [waiting, waiting[2:] * 50], 600)[0] > 600 + 50


def test_registers_and_lds_limit_the_waves() -> None:
    assert waves_by_registers("gfx942", 256) == 2 and waves_by_registers("gfx942", 257) == 1
    assert waves_by_registers("gfx1100", 96) == 16 and waves_by_registers("gfx1100", 193) == 7
    # A work-group of 8 waves with all 64 KiB of a compute unit; two of 4 waves with half; four of 8 of RDNA's 128.
    assert waves_that_fit("gfx942", 128, 65536, 8) == waves_that_fit("gfx942", 128, 32768, 4) == 2
    assert waves_that_fit("gfx942", 256, 0, 4) == 2 and waves_that_fit("gfx1100", 163, 32768, 8) == 8


def test_a_file_that_is_no_code_object_is_refused() -> None:
    with pytest.raises(DeviceError, match="here is damaged"):
        CodeObject(b"no", "gfx942", "here")


def test_command_line_names_what_is_there(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    from tests.hip.executor.__main__ import main

    monkeypatch.setattr("sys.argv", ["executor", "report", "rop"])
    assert main() == 1
    assert "no code object of 'rop' for gfx942; there are activation" in capsys.readouterr().err
