"""An AMD code object: what is loaded, its kernels, and their instructions as text.

Layout: LLVM, User Guide for AMDGPU Backend, "Code Object" and "Kernel Descriptor".
"""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import struct
import subprocess
import tempfile
from functools import cache
from typing import Any, NamedTuple

import msgpack
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from wgrad.hip.runtime.architectures import check_image

_NEWER = {"gfx950": "22"}  # of LLVM, for architectures that 19 does not know
_METADATA = 32  # NT_AMDGPU_METADATA
_DESCRIPTOR = struct.Struct("<IIIIq20xIIIHH4x")
_LINE = re.compile(r"^\s+(\S.*?)\s*//\s*([0-9A-Fa-f]+):\s*((?:[0-9A-Fa-f]{8}\s*)+)")


class ExecutorError(RuntimeError):
    """An instruction or file that the executor refuses, or an access that a GPU would not survive."""


class Segment(NamedTuple):
    """Bytes to be loaded at a virtual address; size: of the memory, which may be more."""

    address: int
    data: bytes
    size: int


class Descriptor(NamedTuple):
    """The kernel descriptor. Sizes in bytes; entry and address: virtual addresses of the code and of itself."""

    address: int
    lds: int
    scratch: int
    arguments: int
    entry: int
    rsrc1: int
    rsrc2: int
    rsrc3: int
    properties: int


class Instruction(NamedTuple):
    """One instruction as llvm-objdump writes it; address: virtual, size: bytes."""

    address: int
    text: str
    size: int

    @property
    def name(self) -> str:
        return self.text.split()[0]


def object_digest(image: bytes) -> str:
    """The first 16 digits of a code object's SHA-256, which hip/objects/manifest.json has whole."""
    return hashlib.sha256(image).hexdigest()[:16]


def disassembler(architecture: str) -> str:
    """The name of the program that disassembles an architecture's code objects."""
    return f"llvm-objdump-{_NEWER.get(architecture, '19')}"


class CodeObject:
    """The kernels of an ELF file for `architecture`; where: what errors call it.

    Raises:
        DeviceError: it is damaged or for another architecture. ExecutorError: it has no kernels, or wants relocations.
    """

    def __init__(self, image: bytes, architecture: str, where: str) -> None:
        check_image(image, where, architecture, "the executor")
        self.image, self.architecture = image, architecture
        self.digest = object_digest(image)
        elf = ELFFile(io.BytesIO(image))
        self.segments = [
            Segment(s["p_vaddr"], s.data(), s["p_memsz"]) for s in elf.iter_segments("PT_LOAD") if s["p_memsz"]
        ]
        tables = [s for s in elf.iter_sections() if isinstance(s, SymbolTableSection)]
        self.symbols = {s.name: (s["st_value"], s["st_size"]) for t in tables for s in t.iter_symbols() if s.name}
        if any(s["sh_type"] in ("SHT_REL", "SHT_RELA") and s["sh_size"] for s in elf.iter_sections()):
            raise ExecutorError(f"{where} has relocations, which the executor does not apply")
        notes = [n for s in elf.iter_segments("PT_NOTE") for n in s.iter_notes()]
        found = [n["n_descdata"] for n in notes if n["n_name"] == "AMDGPU" and n["n_type"] == _METADATA]
        if not found:
            raise ExecutorError(f"{where} has no AMDGPU metadata: link it with ld.lld, as `make objects` does")
        self.kernels: dict[str, dict[str, Any]] = {k[".name"]: k for k in msgpack.unpackb(found[0])["amdhsa.kernels"]}

    def lanes(self, kernel: str) -> int:
        """Lanes of a wave: 32 or 64."""
        return int(self.kernels[kernel][".wavefront_size"])

    def descriptor(self, kernel: str) -> Descriptor:
        address = self.symbols[f"{kernel}.kd"][0]
        (segment,) = (s for s in self.segments if s.address <= address < s.address + len(s.data))
        lds, scratch, arguments, _, entry, r3, r1, r2, properties, _ = _DESCRIPTOR.unpack_from(
            segment.data, address - segment.address
        )
        return Descriptor(address, lds, scratch, arguments, address + entry, r1, r2, r3, properties)

    @cache  # noqa: B019 - as long-lived as the listing
    def listing(self, kernel: str) -> list[Instruction]:
        """The instructions of a kernel, in order, with the padding behind it."""
        start, size = self.symbols[kernel]
        if shutil.which(objdump := disassembler(self.architecture)) is None:
            raise ExecutorError(f"{objdump} is not installed: apt-get install {objdump.replace('-objdump', '')}")
        limits = [f"--start-address={start:#x}", f"--stop-address={start + size:#x}"]
        with tempfile.NamedTemporaryFile(suffix=".co") as file:
            file.write(self.image)
            file.flush()
            command = [objdump, "-d", f"--mcpu={self.architecture}", *limits, file.name]
            said = subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout
        lines = (m for line in said.splitlines() if (m := _LINE.match(line)))
        return [Instruction(int(m[2], 16), m[1], 4 * len(m[3].split())) for m in lines]
