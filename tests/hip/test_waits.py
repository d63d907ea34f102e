"""No barrier of the code objects is reached before the wave's accesses to LDS are done."""

from __future__ import annotations

import re
import shutil
import zlib
from pathlib import Path

import pytest

from tests.hip.executor.code_object import CodeObject
from tests.hip.executor.device import shipped
from tests.hip.executor.table import OBJECTS
from tests.hip.executor.waits import unwaited_barriers
from tests.tools import CLANG, clang_for
from wgrad.hip.runtime.architectures import SHIPPED
from wgrad.hip.runtime.build import compile_source
from wgrad.hip.runtime.objects import MANIFEST, headers, serves, sources

# Those whose barriers are written in assembly, each on another architecture whenever an object has changed. --all: all.
READ_HERE = [a for a in SHIPPED if not clang_for(a).missing] or SHIPPED
TURN = zlib.crc32((OBJECTS / MANIFEST).read_bytes())
SAMPLE = [
    (source, READ_HERE[(TURN + n) % len(READ_HERE)])
    for n, source in enumerate(("attention_backward_dkv", "attention_backward_dq", "attention_forward", "gemm_skinny"))
]
PLANTED = """
#include "gpu.hpp"
extern "C" GPU_KERNEL(128) void planted(const float* x, float* y, gpu::u32 n) {
  GPU_SHARED(float, memory, 128);
  for (gpu::u32 i = 0; i < n; i++) {
    memory[gpu::thread()] = x[i * 128 + gpu::thread()];
    gpu::lds_barrier();
    y[i * 128 + gpu::thread()] = memory[gpu::thread() ^ 64];
    gpu::lds_barrier();
  }
}
"""
# gfx950 needs 20 wait states after an MFMA of 16 bits and 16 passes, and clang before llvm/llvm-project#222040 looks
# back 19 instructions. These have 4 passes, of float32 8: 12 wait states or fewer.
SHORT = re.compile(r"v_mfma_f32_16x16x(16_b?f16|32_b?f16|4_f32)$")
WAITS = ("s_wait_dscnt 0x0\\n\\t", "s_waitcnt lgkmcnt(0)\\n\\t")


def check(source: str, architecture: str) -> None:
    found = shipped(source, architecture)
    wrong = {kernel: unwaited_barriers(found.listing(kernel)) for kernel in found.kernels}
    assert {kernel: addresses for kernel, addresses in wrong.items() if addresses} == {}
    if architecture == "gfx950":
        names = {i.name for kernel in found.kernels for i in found.listing(kernel) if i.name.startswith("v_mfma")}
        assert {name for name in names if not SHORT.match(name)} == set()


@pytest.mark.parametrize(("source", "architecture"), SAMPLE)
def test_barriers_wait_for_lds(source: str, architecture: str) -> None:
    clang_for(architecture).require()
    check(source, architecture)


@pytest.mark.all
@pytest.mark.parametrize("architecture", SHIPPED)
def test_every_barrier_waits_for_lds(architecture: str) -> None:
    clang_for(architecture).require()
    for path in sources():
        if serves(path, architecture):
            check(path.stem, architecture)


@CLANG.needed
@pytest.mark.parametrize("architecture", ["gfx942", "gfx1100", "gfx1201"])
def test_a_barrier_without_its_wait_is_found(tmp_path: Path, architecture: str) -> None:
    """The wait in `lds_barrier` removed, in a loop and behind it."""
    for header in headers():
        shutil.copy(header, tmp_path)
    (tmp_path / "planted.hip").write_text(PLANTED)
    header, counts = tmp_path / "gpu_device.hpp", []
    for wait in ("", *WAITS):
        header.write_text(header.read_text().replace(wait, "") if wait else header.read_text())
        compile_source(tmp_path / "planted.hip", architecture, tmp_path / "planted.co")
        made = CodeObject((tmp_path / "planted.co").read_bytes(), architecture, "planted.co")
        counts.append(len(unwaited_barriers(made.listing("planted"))))
    assert counts[0] == 0 and counts[2] > 0
