"""What the shipped code objects say of themselves: no kernel spills, and the committed tables were made from them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import msgpack
import pytest

from wgrad.hip.runtime.architectures import SHIPPED
from wgrad.hip.runtime.objects import KERNELS, read_manifest, read_object

OBJECTS = KERNELS.parent / "objects"
RESULTS = Path(__file__).parents[2] / "bench" / "results"
METADATA = 32  # NT_AMDGPU_METADATA. Source: LLVM, User Guide for AMDGPU Backend, "Note Records"


def kernels(path: Path) -> list[dict[str, Any]]:
    """The kernels of a code object: the MessagePack map in its AMDGPU note."""
    image = read_object(path)
    at = image.index(b"AMDGPU\0")
    name_size, size, kind = struct.unpack_from("<III", image, at - 12)
    assert (name_size, kind) == (7, METADATA)
    return msgpack.unpackb(image[at + 8 : at + 8 + size])["amdhsa.kernels"]


@pytest.mark.parametrize("architecture", SHIPPED)
def test_no_kernel_spills(architecture: str) -> None:
    """Neither registers to memory nor arrays in it; LDS and wave size as the kernels were written for."""
    wave = 64 if architecture.startswith("gfx9") else 32
    names = []
    for path in sorted((OBJECTS / architecture).glob("*.co.xz")):
        for kernel in kernels(path):
            names.append(kernel[".name"])
            assert kernel[".vgpr_spill_count"] == kernel[".sgpr_spill_count"] == 0, kernel
            assert kernel[".private_segment_fixed_size"] == 0, kernel
            assert kernel[".group_segment_fixed_size"] <= 65536 and kernel[".wavefront_size"] == wave, kernel
    assert len(names) == len(set(names)) > 100


@pytest.mark.parametrize("table", ["hip_isa", "hip_attention", "hip_isa_memory"])
def test_tables_are_of_these_objects(table: str) -> None:
    """A table's bars (other tests hold them) say something of what ships only if it was made from that."""
    objects = read_manifest(OBJECTS)["objects"]
    rows = [json.loads(line) for line in (RESULTS / f"{table}.jsonl").read_text().splitlines()]
    stale = {(r["arch"], r["source"]) for r in rows if objects[f"{r['arch']}/{r['source']}.co"][:16] != r.get("object")}
    assert not stale, f"run bench/{table}.py again"
    assert {r["arch"] for r in rows} == set(SHIPPED)
