"""Known faults of GPU drivers: the adapters concerned, symptoms, advice, and source.

Every entry cites a public issue, or the release notes of the version that has it fixed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

NVIDIA, AMD, INTEL, QUALCOMM = 0x10DE, 0x1002, 0x8086, 0x5143  # PCI
Kind = Literal["wrong", "crash", "slow", "note"]
_MIB = 1 << 20


@dataclass(frozen=True)
class Fault:
    """A known fault. The fields from `vendors` on select adapters; those left out match all.

    Attributes:
        kind: Wrong results, a crash, low speed, or only a note that nothing can change.
        seen: Symptoms in words.
        advice: What to do, in the imperative.
        source: URL of the issue or release notes.
        vendors: PCI ids.
        system: As of `platform.system`.
        kernel: Oldest version of the system's kernel.
        backend, type: As in `Device.facts`.
        name, driver: Regular expressions.
        driver_from, driver_below: First version of the driver with the fault, and without it again, by the first group
            of `driver`.
        mesa_below, library_below: First version of Mesa, or of wgpu's library, without the fault.
        has, lacking: A feature that the adapter must have or lack.
        bar_bytes: Most bytes of memory that the GPU exposes to the CPU.
    """

    kind: Kind
    seen: str
    advice: str
    source: str
    vendors: tuple[int, ...] = ()
    system: str = ""
    kernel: tuple[int, ...] = ()
    backend: str = ""
    type: str = ""
    name: str = ""
    driver: str = ""
    driver_from: tuple[int, ...] = ()
    driver_below: tuple[int, ...] = ()
    mesa_below: tuple[int, ...] = ()
    library_below: tuple[int, ...] = ()
    has: str = ""
    lacking: str = ""
    bar_bytes: int = 0

    @property
    def text(self) -> str:
        return f"{self.seen}: {self.advice} ({self.source})"


FAULTS = (
    Fault(
        "wrong",
        "matmuls on Battlemage are wrong now and then with Mesa before 26.2.2",
        "update Mesa to 26.2.2 or newer",
        "github.com/ggml-org/llama.cpp/issues/25767",
        (INTEL,),
        name=r"BMG|\bB[5-7][0-9]0?\b",
        mesa_below=(26, 2, 2),
    ),
    Fault(
        "wrong",
        "matmuls on the tensor cores of Panther Lake (Xe3) are wrong with Mesa before 26.1.6",
        "update Mesa to 26.1.6 or newer, or set WGRAD_MATRIX_UNITS=off",
        "docs.mesa3d.org/relnotes/26.1.6.html",
        (INTEL,),
        backend="Vulkan",
        name=r"\bPTL\b|\bB3[79]0\b",
        mesa_below=(26, 1, 6),
        has="cooperative-matrix",
    ),
    Fault(
        "wrong",
        "small matmuls on Adreno 702 are wrong with Mesa's Turnip",
        "use --device cpu, and compare before you trust a newer Mesa",
        "github.com/ggml-org/llama.cpp/issues/25906",
        (QUALCOMM,),
        name=r"Adreno.*\b702\b",
        driver="Mesa",
    ),
    Fault(
        "wrong",
        "subgroup operations are wrong on AMD GPUs through MoltenVK",
        "take the adapter of Metal (wgrad devices lists it)",
        "github.com/KhronosGroup/MoltenVK/issues/2756",
        (AMD,),
        system="Darwin",
        backend="Vulkan",
    ),
    Fault(
        "wrong",
        "subgroup sums are wrong on Intel UHD GPUs through MoltenVK",
        "take the adapter of Metal (wgrad devices lists it)",
        "github.com/KhronosGroup/MoltenVK/issues/2757",
        (INTEL,),
        system="Darwin",
        backend="Vulkan",
    ),
    Fault(
        "crash",
        "AMD's driver for integrated GPUs crashes on Windows while cooperative matrices are read",
        "update AMD Software; until then take the adapter of DX12 or another GPU",
        "github.com/GPUOpen-Drivers/AMDVLK/issues/422",
        (AMD,),
        system="Windows",
        backend="Vulkan",
        type="IntegratedGPU",
    ),
    Fault(
        "crash",
        "AMD Software from 26.5.1 on crashes programs that compute with Vulkan",
        "install AMD Software 26.3.1, or take the adapter of DX12",
        "github.com/ggml-org/llama.cpp/issues/23508",
        (AMD,),
        system="Windows",
        backend="Vulkan",
        type="DiscreteGPU",
        driver=r"^(\d+\.\d+\.\d+) \(",
        driver_from=(26, 5, 1),
    ),
    Fault(
        "crash",
        "Intel's driver for Arc before 32.0.101.8860 loses the GPU in work of Vulkan now and then",
        "update it to 32.0.101.8860 or newer",
        "github.com/ggml-org/llama.cpp/issues/22034",
        (INTEL,),
        system="Windows",
        backend="Vulkan",
        type="DiscreteGPU",
        driver=r"\b101\.(\d+)",
        driver_below=(8860,),
    ),
    Fault(
        "crash",
        "Linux 7 resets an AMD GPU whose work takes 2 seconds, where Linux 6 waited a minute",
        "if the device is lost, use a smaller --batch-size, or start the kernel with "
        "amdgpu.lockup_timeout=10000,60000,10000,10000",
        "github.com/ggml-org/llama.cpp/issues/25664",
        (AMD,),
        system="Linux",
        kernel=(7,),
        type="IntegratedGPU",
    ),
    Fault(
        "crash",
        "macOS ends work that takes some 100 ms, and wgpu before 30 then waits for ever",
        "if a run stands still, end it and use a smaller --batch-size or --max-length with --resume",
        "github.com/gfx-rs/wgpu/issues/9531",
        backend="Metal",
        library_below=(30,),
    ),
    Fault(
        "slow",
        "DX12 compiles shaders with FXC here, which is slow and has neither float16 nor subgroups",
        "take the adapter of Vulkan where there is one",
        "github.com/gfx-rs/wgpu/issues/2722",
        backend="D3D12",
        lacking="shader-f16",
    ),
    Fault(
        "slow",
        "resizable BAR is off, so the processor reaches 256 MiB of the GPU's memory at a time",
        "turn on Above 4G Decoding and Resizable BAR in the firmware's setup",
        "github.com/ggml-org/llama.cpp/issues/27097",
        (AMD,),
        type="DiscreteGPU",
        bar_bytes=256 * _MIB,
    ),
    Fault(
        "note",
        "Metal's compiler may drop a barrier, after which values in workgroup memory are wrong",
        "nothing: a run checks its operators against NumPy first, and leaves out a kernel that is wrong",
        "github.com/gfx-rs/wgpu/issues/4500",
        backend="Metal",
    ),
    Fault(
        "note",
        "RADV runs kernels on tensor cores in subgroups of 64 lanes, and has changed that before",
        "nothing: wgrad has kernels for 64, 32, 16 and 8, and reads which the driver takes",
        "github.com/ggml-org/llama.cpp/issues/16339",
        (AMD,),
        backend="Vulkan",
        driver="Mesa",
        has="cooperative-matrix",
    ),
    Fault(
        "note",
        "Pascal has no shader-f16 with any driver",
        "nothing: runs are in float32",
        "github.com/nomic-ai/gpt4all/issues/1836",
        (NVIDIA,),
        name=r"GTX 10[5-8]0|\bP(4|6|40|600|1000|2000|2200|4000|5000|6000)\b|TITAN Xp?\b|GT 1030",
        lacking="shader-f16",
    ),
    Fault(
        "note",
        "Polaris has no shader-f16 with any driver",
        "nothing: runs are in float32",
        "github.com/GPUOpen-Drivers/AMDVLK/issues/94",
        (AMD,),
        name=r"POLARIS|\bRX 4[678]0|\bRX 5[5-9]0",
        lacking="shader-f16",
    ),
)


def known_faults(adapter: Mapping[str, Any], system: str, kernel: str = "") -> list[Fault]:
    """Return the reported faults that concern an adapter.

    Args:
        adapter: Facts of a device (`Device.facts`), with `bar_bytes` if known.
        system: Linux, Windows or Darwin, as `platform.system` returns it.
        kernel: Version of the system's kernel, as `platform.release` returns it.
    """
    return [fault for fault in FAULTS if _concerns(fault, adapter, system, kernel)]


def _concerns(fault: Fault, adapter: Mapping[str, Any], system: str, kernel: str) -> bool:
    name, driver, features = str(adapter.get("name", "")), str(adapter.get("driver", "")), adapter.get("features", ())
    mesa, library = _version(driver, r"Mesa "), _version(str(adapter.get("library", "")), r"wgpu-native ")
    bar, of_driver = adapter.get("bar_bytes"), _version(driver, fault.driver, "")
    return all(
        (
            not fault.vendors or adapter.get("vendor_id") in fault.vendors,
            fault.system in ("", system),
            not fault.kernel or _version(kernel) >= fault.kernel,
            fault.backend in ("", adapter.get("backend")),
            fault.type in ("", adapter.get("type")),
            re.search(fault.name, name) is not None,
            re.search(fault.driver, driver) is not None,
            not fault.driver_from or of_driver >= fault.driver_from,
            not fault.driver_below or () < of_driver < fault.driver_below,
            not fault.mesa_below or () < mesa < fault.mesa_below,
            not fault.library_below or () < library < fault.library_below,
            not fault.has or fault.has in features,
            not fault.lacking or ("features" in adapter and fault.lacking not in features),
            not fault.bar_bytes or (bar is not None and bar <= fault.bar_bytes),
        )
    )


def _version(text: str, before: str = "^", version: str = r"(\d+(?:\.\d+)*)") -> tuple[int, ...]:
    """Return the version that follows a text, as the first group of the expression; empty: there is none."""
    found = re.search(before + version, text)
    return tuple(map(int, found[1].split("."))) if found and found.re.groups else ()
