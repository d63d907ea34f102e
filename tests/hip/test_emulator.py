"""The emulator itself: mutants of small kernels are found, and the matrix instructions are what they should be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hip.emulator import build
from tests.hip.emulator.build import build_kernels
from wgrad.device.errors import DeviceLost

KERNELS = """
#include "gpu.hpp"
using namespace gpu;
extern "C" GPU_KERNEL(128) void neighbor(const float* x, float* y, u32 with_barrier) {
  GPU_SHARED(float, memory, 128);
  memory[thread()] = x[thread()];
  if (with_barrier) barrier();
  y[thread()] = memory[(thread() + GPU_WAVE) % 128];
}
extern "C" GPU_KERNEL(64) void lds_overrun(float* y, u32 at) {
  GPU_SHARED(float, memory, 64);
  memory[at] = 1.f;
  y[thread()] = memory[thread()];
}
extern "C" GPU_KERNEL(64) void divergent(float* y) {
  if (thread() % GPU_WAVE < 3) y[thread()] = shuffle(1.f, 0);
  barrier();
}
extern "C" GPU_KERNEL(64) void skipped_last(float* y) {
  y[thread()] = 1.f;
  if (thread() % GPU_WAVE < 3) barrier();
}
extern "C" GPU_KERNEL(64) void skipped_first(float* y) {
  if (thread() % GPU_WAVE < 3) barrier();
  y[thread()] = 1.f;
  barrier();
}
extern "C" GPU_KERNEL(128) void skipped_by_a_wave(float* y) {
  if (thread() < GPU_WAVE) barrier();
  y[thread() % 64] = 1.f;
}
extern "C" GPU_KERNEL(64) void skipped_in_a_loop(float* y) {
  for (u32 i = 0; i < 2 + thread() % 2; i++) barrier();
  y[thread()] = 1.f;
}
extern "C" GPU_KERNEL(64) void misaligned(const float* x, u32 at) { store16((float*)x, load16(x + at)); }
extern "C" GPU_KERNEL(64) void sums(const float* x, float* y) {
  y[thread()] = wave_sum(x[thread()]);
  y[64 + thread()] = wave_max(x[thread()]);
  y[128 + thread()] = shuffle_xor(x[thread()], 5);
}
#if GPU_CDNA
template <class E, class V, class C, u32 SIDE, u32 PER, C (*F)(V, V, C)>
GPU_FN void product(const E* a, const E* b, float* d) {  // a [SIDE, K], b [K, SIDE]
  V x, y;
  constexpr u32 K = 64 / SIDE * PER;
  u32 l = thread();
  for (u32 r = 0; r < PER; r++) x[r] = a[l % SIDE * K + PER * (l / SIDE) + r];
  for (u32 r = 0; r < PER; r++) y[r] = b[(PER * (l / SIDE) + r) * SIDE + l % SIDE];
  C c = {};
  c = F(x, y, c);
  for (u32 r = 0; r < SIDE * SIDE / 64; r++) {
    u32 row = SIDE == 16 ? 4 * (l / 16) + r : 8 * (r / 4) + 4 * (l / 32) + r % 4;
    d[row * SIDE + l % SIDE] = c[r];
  }
}
extern "C" GPU_KERNEL(64) void matrix16(const half* a, const half* b, float* d) {
  product<half, f16x4, f32x4, 16, 4, mfma_f32_16x16x16_f16>(a, b, d);
}
extern "C" GPU_KERNEL(64) void matrix32(const half* a, const half* b, float* d) {
  product<half, f16x4, f32x16, 32, 4, mfma_f32_32x32x8_f16>(a, b, d);
}
#endif
#if GPU_RDNA3
extern "C" GPU_KERNEL(32) void matrix16(const half* a, const half* b, float* d) {
  f16x16 x, y;
  u32 l = thread();
  for (u32 r = 0; r < 16; r++) x[r] = a[l % 16 * 16 + r], y[r] = b[r * 16 + l % 16];
  f32x8 c = {};
  c = wmma_f32_16x16x16_f16(x, y, c);
  for (u32 r = 0; r < 8; r++) d[(2 * r + l / 16) * 16 + l % 16] = c[r];
}
#endif
"""


@pytest.fixture
def probe(emulator: Any, hip_device: Any, tmp_path: Path) -> Any:
    """Return the device with the kernels above in addition to its own."""
    source = tmp_path / "probe.hip"
    source.write_text(KERNELS)
    build_kernels(source, hip_device.architecture, emulator.folder)
    return hip_device


def test_the_compiler_is_started_again_for_a_changed_source_alone(
    emulator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "one.hip"
    text = '#include "gpu.hpp"\nextern "C" GPU_KERNEL(64) void one(float* y) {{ y[gpu::thread()] = {}; }}\n'
    source.write_text(text.format("1.f"))
    build_kernels(source, "gfx942", tmp_path)
    started: list[list[str]] = []
    run = build._run

    def noted(command: list[str], **more: Any) -> str:
        started.append(command)
        return run(command, **more)

    monkeypatch.setattr(build, "_run", noted)
    build_kernels(source, "gfx942", tmp_path)
    assert started == []
    before = source.stat().st_mtime_ns
    source.write_text(text.format("2.f"))
    os.utime(source, ns=(before + 1, before + 1))
    build_kernels(source, "gfx942", tmp_path)
    assert len(started) == 2


def test_missing_barrier_shows_in_one_of_the_orders(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = probe.upload(np.arange(128, dtype=np.float32))
    wanted = np.roll(np.arange(128, dtype=np.float32), -probe.wave)
    right = {0: 0, 1: 0}
    for order in ("fwd", "rev"):
        monkeypatch.setenv("WGRAD_EMULATED_ORDER", order)
        for barrier in right:
            y = probe.empty((128,))
            probe.launch("probe", "neighbor", [x, y, barrier], (1, 1, 1), threads=128)
            right[barrier] += np.array_equal(probe.download(y), wanted)
    assert right[1] == 2 and right[0] < 2


@pytest.mark.parametrize(
    ("kernel", "argument", "message"),
    [
        ("lds_overrun", 64, "past the end of an LDS array of 256 bytes"),
        ("divergent", None, "some lanes of a wave wait"),
        ("misaligned", 1, "not aligned"),
        ("skipped_last", None, "some lanes of a wave have ended, and others wait at a barrier"),
        ("skipped_first", None, "lanes of a wave wait at different barriers"),
        ("skipped_by_a_wave", None, "a wave has ended, and others wait at a barrier"),
        ("skipped_in_a_loop", None, "some lanes of a wave have ended, and others wait at a barrier"),
    ],
)
def test_mutants_are_found(
    probe: Any, emulator: Any, blocking: None, kernel: str, argument: int | None, message: str
) -> None:
    arguments = [probe.zeros((64,))] + ([] if argument is None else [argument])
    with pytest.raises(DeviceLost):
        probe.launch("probe", kernel, arguments, (1, 1, 1), threads=128 if "wave" in kernel else 64)
    assert message in emulator.last_failure


def test_wave_sums_stay_within_a_wave(probe: Any) -> None:
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    y = probe.empty((192,))
    probe.launch("probe", "sums", [probe.upload(x), y], (1, 1, 1), threads=64)
    found = probe.download(y).reshape(3, -1, probe.wave)
    waves = x.reshape(-1, probe.wave)
    np.testing.assert_allclose(found[0], np.repeat(waves.sum(1)[:, None], probe.wave, 1), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[1], np.repeat(waves.max(1)[:, None], probe.wave, 1))
    np.testing.assert_array_equal(found[2], waves[:, np.arange(probe.wave) ^ 5])


@pytest.mark.parametrize(("kernel", "side", "depth"), [("matrix16", 16, 16), ("matrix32", 32, 8)])
def test_matrix_instructions_are_exact(probe: Any, kernel: str, side: int, depth: int) -> None:
    if kernel == "matrix32" and probe.wave == 32:
        pytest.skip("WMMA has no 32 x 32 form")
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-8, 8, shape).astype(np.float16) for shape in ((side, depth), (depth, side)))
    d = probe.empty((side, side))
    probe.launch("probe", kernel, [probe.upload(a), probe.upload(b), d], (1, 1, 1), threads=probe.wave)
    np.testing.assert_array_equal(probe.download(d), a.astype(np.float32) @ b.astype(np.float32))
