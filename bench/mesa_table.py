"""Compile wgrad's shaders with Mesa's drivers for AMD (RADV) and Intel (ANV), without a GPU: registers, spills and
memory by kernel.

    python bench/mesa_table.py --driver LIB --family gfx1100       a GPU, or a name that RADV_FORCE_FAMILY takes
    python bench/mesa_table.py --driver LIB --family dg2 --shim    an Intel GPU
    python bench/mesa_table.py --table                             print the tables of the documentation

LIB: the path of libvulkan_radeon.so or libvulkan_intel.so. Needs a C compiler and Vulkan's headers (libvulkan-dev;
CPPFLAGS may name them). Mesa 26 has no RADV_FORCE_FAMILY: preload its libamdgpu_noop_drm_shim.so with
AMDGPU_GPU_ID=gfx1201, and give --shim. For Intel preload libintel_noop_drm_shim.so with INTEL_STUB_GPU_PLATFORM=dg2.
Debian does not package it; Mesa's source builds it in a minute: meson setup build -Dtools=drm-shim,intel
-Dvulkan-drivers= -Dgallium-drivers= and so on, ninja src/intel/tools/libintel_noop_drm_shim.so.
The variants are those of the self-test and of matmuls and attention in the sizes of 1B and 8B models, with tensor cores
and without, as wgpu hands them to the driver.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
RESULTS = {"amd": HERE / "results" / "radv.jsonl", "intel": HERE / "results" / "anv.jsonl"}
FAMILIES = {"gfx1030": "navi21", "gfx1100": "navi31"}  # as RADV_FORCE_FAMILY calls them
F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
SHAPES = (
    (2048, 4096, 4096),
    (2048, 14336, 4096),
    (16, 4096, 4096),
    (256, 4096, 4096),
    (512, 512, 512),
    (1, 4096, 4096),
)
MANY_VGPRS = 96  # kernels with more are listed one by one
EXPERTS, EXPERT_TOKENS = 16, (2, 16, 64, 256, 1024)  # of which each goes to 8
WIDTHS, LENGTHS, RANKS = (32, 64, 96, 128), (64, 2048), (16, 64)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--driver", type=Path)
    parser.add_argument("--family", default="")
    parser.add_argument("--shim", action="store_true")
    parser.add_argument("--only", default="", help="kernels whose names begin with one of these, by commas")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        for vendor, of_vendor in (("amd", tables), ("intel", intel_table)):
            print(of_vendor([json.loads(line) for line in RESULTS[vendor].read_text(encoding="utf-8").splitlines()]))
        return 0
    with tempfile.TemporaryDirectory() as name:
        prepare(args, Path(name))
        gpu = args.family or os.environ.get("AMDGPU_GPU_ID", "")
        rows = compile_all(Path(name) / "pipelines.jsonl", gpu, args.only)
    file = args.out or RESULTS["intel" if "spills" in rows[0] else "amd"]
    with file.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    print(f"{len(rows)} rows in {file}")
    return 0


def prepare(args: argparse.Namespace, folder: Path) -> None:
    """Build the driver in front of RADV and let Vulkan's loader use it in this process.

    The copy of wgpu's library is cached in its own folder.
    """
    library, manifest = folder / "null_vulkan.so", folder / "icd.json"
    flags = [*shlex.split(os.environ.get("CPPFLAGS", "")), "-shared", "-fPIC", "-o", str(library)]
    subprocess.run(["cc", *flags, str(HERE / "null_vulkan.c"), "-ldl"], check=True)
    named = {"library_path": str(library), "api_version": "1.3.0"}
    manifest.write_text(json.dumps({"file_format_version": "1.0.0", "ICD": named}))
    os.environ |= {
        "NULL_VULKAN_DRIVER": str(args.driver.resolve()),
        "NULL_VULKAN_OUT": str(folder / "pipelines.jsonl"),
        "VK_DRIVER_FILES": str(manifest),
        "VK_ICD_FILENAMES": str(manifest),
        "MESA_SHADER_CACHE_DISABLE": "true",
        "XDG_CACHE_HOME": str(folder),
        "WGRAD_MATRIX_UNITS": "trial",
        **({"NULL_VULKAN_SHIM": "1"} if args.shim else {"RADV_FORCE_FAMILY": FAMILIES.get(args.family, args.family)}),
    }
    from wgrad.wgsl.runtime import matrix_units

    matrix_units.write_copy()


def compile_all(statistics_file: Path, gpu: str, only: str = "") -> list[dict[str, Any]]:
    """A row for each kernel, with tensor cores and without."""
    from wgrad.autograd.bind import bind
    from wgrad.wgsl.device import WgpuDevice
    from wgrad.wgsl.runtime import adapter_check, adapters, cooperative

    adapters._verdict = adapter_check.Verdict(backends=("Vulkan",))  # this process may crash
    cooperative.lanes_of = lambda device: 64  # nothing runs, so the probe would tell nothing; `wave` below does
    device: Any = bind(WgpuDevice)("0")
    device.software = False
    mesa = device.facts["driver"].removeprefix("Mesa ").partition("-")[0]
    has_units = device.matrix_units
    found: dict[str, list[dict[str, Any]]] = {}
    for units in (True, False) if has_units else (False,):
        device.matrix_units = units
        for variant in variants(device, units):
            if ("matrix" in variant.shader) == units and variant.shader.startswith(tuple(only.split(","))):
                found.setdefault(variant.shader, []).append(compiled(device, variant, statistics_file))
    return [{"gpu": gpu, "mesa": mesa, "kernel": kernel, **summary(of)} for kernel, of in sorted(found.items())]


def variants(device: Any, units: bool) -> list[Any]:
    from wgrad.autograd.selftest.case import upload_inputs
    from wgrad.autograd.selftest.cases import cases
    from wgrad.autograd.selftest.matrix import matrix_cases
    from wgrad.device.errors import WgradError
    from wgrad.device.formats.frozen_weight import formats
    from wgrad.wgsl.roofline import roofs

    dry = device.dry_run()
    for case in [*cases(), *(matrix_cases() if units else ())]:
        try:
            case.call(dry, upload_inputs(dry, case.inputs()))
        except WgradError:  # what the device does not have
            continue
    dry.matrix_tile = ""
    kind = F16 if device.float16 else F32
    for m, n, k in SHAPES:
        for trans_a, trans_b in ((False, False), (False, True), (True, False)):
            a, b = (k, m) if trans_a else (m, k), (n, k) if trans_b else (k, n)
            dry.gemm(dry.empty(a, kind), dry.empty(b, kind), trans_a=trans_a, trans_b=trans_b)
    # Scales of GGUF's formats are float16, which not every GPU has.
    for format in formats().values() if device.float16 else [formats()["nf4"]]:
        weight = format.quantize(np.zeros((512, 4096), F32)).map_arrays(dry.upload)
        for rows in (1, 16, 64, 128, 256, 2048):
            dry.linear_quantized(dry.empty((rows, 4096), kind), weight, dtype=kind)
            dry.linear_quantized_backward(dry.empty((rows, 512), kind), weight, dtype=kind)
    for name in ("", "nf4", "mxfp4"):
        expert = formats()[name].quantize(np.zeros((EXPERTS * 128, 256), F32)).map_arrays(dry.upload) if name else None
        for tokens in EXPERT_TOKENS:
            start, order = dry.empty((EXPERTS + 1,), np.int32), dry.empty((8 * tokens,), np.int32)
            weight = dry.empty((EXPERTS, 128, 256), kind) if expert is None else expert
            dry.grouped_linear(dry.empty((tokens, 256), kind), weight, start, order=order)
            dry.grouped_linear_backward(dry.empty((8 * tokens, 128), kind), weight, start)
    for rank in RANKS:
        for rows in LENGTHS:
            dry.gemm(dry.empty((rows, 4096), kind), dry.empty((rank, 4096), F32), trans_b=True, dtype=F32)
            dry.gemm(dry.empty((rows, rank), F32), dry.empty((rows, 4096), kind), trans_a=True, dtype=F32)
    for width in WIDTHS:
        for length in LENGTHS:
            q, (k, v) = dry.empty((1, length, 32, width), kind), [dry.empty((1, length, 8, width), kind)] * 2
            first, cache = dry.zeros((1, length), np.int32), dry.zeros((1,), np.int32)
            o, lse = dry.attention(q, k, v, first, cache, scale=0.125)
            dry.attention_backward(q, q, k, v, o, lse, first, scale=0.125)
    if units:
        roofs.matrix_multiply_adds(dry, 8, 4)
    return list(dry.variants)


def compiled(device: Any, variant: Any, statistics_file: Path) -> dict[str, Any]:
    """Statistics of one pipeline, from the driver."""
    device._compiler.make(variant)
    told: dict[str, Any] = json.loads(statistics_file.read_text(encoding="utf-8").splitlines()[-1])
    statistics_file.write_text("")
    return told


def summary(told: list[dict[str, Any]]) -> dict[str, Any]:
    def all_of(name: str) -> list[int]:
        return [one.get(name, 0) for one in told]

    common = {
        "variants": len(told),
        "failed": sum(result != 0 for result in all_of("result")),
        "wave": sorted(set(all_of("wave"))),
    }
    if "Spill Count" in told[0]:
        return common | {
            "live": [round(statistics.mean(all_of("Max live registers"))), max(all_of("Max live registers"))],
            "spilling": sum(map(bool, all_of("Spill Count"))),
            "spills": max(all_of("Spill Count")),
            "fills": max(all_of("Fill Count")),
            "scratch": max(all_of("Scratch Memory Size")),
            "memory": max(all_of("Workgroup Memory Size")),
        }
    return common | {
        "vgprs": [round(statistics.mean(all_of("VGPRs"))), max(all_of("VGPRs"))],
        "sgprs": [round(statistics.mean(all_of("SGPRs"))), max(all_of("SGPRs"))],
        "spilling": sum(bool(v or s) for v, s in zip(all_of("Spilled VGPRs"), all_of("Scratch size"))),
        "spilled_vgprs": max(all_of("Spilled VGPRs")),
        "spilled_sgprs": max(all_of("Spilled SGPRs")),
        "lds": max(all_of("LDS size")),
        "wmma": min(all_of("wmma")),
    }


def tables(rows: list[dict[str, Any]]) -> str:
    """Markdown: a table of the kernels on tensor cores, and one of the others that take many registers or spill."""
    out = []
    for title, wanted in (("Tensor cores", True), ("Other kernels", False)):
        out += [f"### {title}", "", "| GPU | Mesa | kernel | variants | wave | VGPRs, mean and most | SGPRs | "]
        out[-1] += "variants that spill VGPRs | spilled SGPRs | LDS bytes |" + " WMMA, at least |" * wanted
        out.append("| --- " * (10 + wanted) + "|")
        for row in rows:
            many = wanted or row["vgprs"][1] > MANY_VGPRS or row["spilling"]
            if bool(row["wmma"]) == wanted and many:
                wave = ", ".join(map(str, row["wave"]))
                cells = [row["gpu"], row["mesa"], f"`{row['kernel']}`", row["variants"], wave]
                cells += [f"{row['vgprs'][0]}, {row['vgprs'][1]}", row["sgprs"][1], row["spilling"]]
                cells += [row["spilled_sgprs"], row["lds"], *([row["wmma"]] if wanted else [])]
                out.append("| " + " | ".join(map(str, cells)) + " |")
        out.append("")
    return "\n".join(out)


def intel_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: the kernels of which a variant spills, and a line for all others of a GPU."""
    out = ["### Intel", "", "| GPU | Mesa | kernel | variants | lanes | registers live, mean and most | variants that "]
    out[-1] += "spill | spills, most | workgroup memory |"
    out.append("| --- " * 9 + "|")
    for row in rows:
        if row["spilling"]:
            lanes = ", ".join(map(str, row["wave"]))
            cells = [row["gpu"], row["mesa"], f"`{row['kernel']}`", row["variants"], lanes]
            cells += [f"{row['live'][0]}, {row['live'][1]}", row["spilling"], row["spills"], row["memory"]]
            out.append("| " + " | ".join(map(str, cells)) + " |")
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        rest = [row for row in rows if row["gpu"] == gpu and not row["spilling"]]
        cells = [gpu, rest[0]["mesa"], f"{len(rest)} others", sum(row["variants"] for row in rest)]
        cells += [", ".join(map(str, sorted({wave for row in rest for wave in row["wave"]}))), "", 0, 0]
        out.append("| " + " | ".join(map(str, [*cells, max(row["memory"] for row in rest)])) + " |")
    return "\n".join(out)


if __name__ == "__main__":
    sys.exit(main())
