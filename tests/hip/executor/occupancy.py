"""The number of waves of a kernel that a SIMD can hold. Source: LLVM, User Guide for AMDGPU Backend, "Processors"."""

from __future__ import annotations

# Registers of a SIMD for a lane, the block that they come in, the most waves; bytes of LDS that four SIMDs share.
_CDNA, _RDNA = (512, 8, 8), (1536, 24, 16)
_SIMD = {"gfx90a": _CDNA, "gfx942": _CDNA, "gfx950": _CDNA, "gfx1100": _RDNA, "gfx1201": _RDNA}
_LDS = {"gfx90a": 65536, "gfx942": 65536, "gfx950": 163840, "gfx1100": 131072, "gfx1201": 131072}
SIMDS = 4  # of a compute unit (CDNA), of a work-group processor (RDNA)


def waves_by_registers(architecture: str, vgprs: int) -> int:
    there, block, most = _SIMD[architecture]
    return min(most, there // max(block, -(-vgprs // block) * block))


def waves_that_fit(architecture: str, vgprs: int, lds: int, waves: int) -> int:
    """Return it, by registers and LDS. lds: bytes of a work-group of `waves` waves. At least 1."""
    groups = _LDS[architecture] // max(lds, 1)
    return max(1, min(waves_by_registers(architecture, vgprs), groups * waves // SIMDS))
