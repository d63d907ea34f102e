"""Metadata of the shipped code objects: no kernel spills registers."""

from __future__ import annotations

import pytest

from tests.hip.executor.code_object import CodeObject
from tests.hip.executor.table import OBJECTS
from wgrad.hip.runtime.architectures import SHIPPED
from wgrad.hip.runtime.objects import read_object


@pytest.mark.parametrize("architecture", SHIPPED)
def test_no_kernel_spills(architecture: str) -> None:
    """Neither registers to memory nor arrays in it; LDS and wave size as the kernels were written for."""
    wave = 64 if architecture.startswith("gfx9") else 32
    names = []
    for path in sorted((OBJECTS / architecture).glob("*.co.xz")):
        for kernel in CodeObject(read_object(path), architecture, str(path)).kernels.values():
            names.append(kernel[".name"])
            assert kernel[".vgpr_spill_count"] == kernel[".sgpr_spill_count"] == 0, kernel
            assert kernel[".private_segment_fixed_size"] == 0, kernel
            assert kernel[".group_segment_fixed_size"] <= 65536 and kernel[".wavefront_size"] == wave, kernel
    assert len(names) == len(set(names)) > 100
