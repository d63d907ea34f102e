"""Find the function in wgpu's library that refuses experimental features, by its machine code.

wgpu_types' Features::all_experimental_mask() returns two words: a constant of 64 bits, and zero. Its compiled code is
the same in every release from wgpu-py 0.26 to 0.32 except for some bits of the constant. A match is accepted only if
exactly one function of the library has this code, with all features that were experimental in each of these releases
and few others. With the gate lifted, the function returns the empty set.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from wgrad.device.errors import DeviceError

_COMMON = 0x00070001_00000000  # bits of the constant in every release that was seen
_MOST_BITS = 12  # six in wgpu-py 0.32; the set of all features has many more
_X86_64, _AARCH64 = "x86-64", "aarch64"
# int3 before and behind; movabs rax, the constant, whose low half is 0; xor edx, edx; ret.
_X86_64_CODE = (b"\xcc\x48\xb8\0\0\0\0", 4, b"\x31\xd2\xc3\xcc")  # before, bytes between, behind: the rarer
_X86_64_EMPTY = bytes.fromhex("31c031d2c3")  # xor eax, eax; xor edx, edx; ret
# ret of the function before; movz x0, a, lsl 32; mov x1, xzr; movk x0, b, lsl 48; ret.
_AARCH64_RET, _AARCH64_ZERO = b"\xc0\x03\x5f\xd6", b"\xe1\x03\x1f\xaa"
_AARCH64_EMPTY = bytes.fromhex("000080d2 010080d2 c0035fd6")  # mov x0, 0; mov x1, 0; ret


@dataclass(frozen=True)
class Gate:
    """Offset of the code to replace in a library, and its replacement."""

    offset: int
    after: bytes

    def lifted(self, data: bytes) -> bytes:
        """Return the bytes of the library with this gate lifted."""
        return data[: self.offset] + self.after + data[self.offset + len(self.after) :]


def find_gate(data: bytes) -> Gate:
    """Return the gate of a library, from the bytes of its file.

    Raises:
        DeviceError: the library is for another kind of processor, or has no such code, or has it more than once.
    """
    processor = _processor(data)
    kinds = {_X86_64: (_gates_x86_64, _X86_64_EMPTY), _AARCH64: (_gates_aarch64, _AARCH64_EMPTY)}
    if processor not in kinds:
        raise DeviceError("it is no library for x86-64 or aarch64 of Linux or Windows")
    places, empty = kinds[processor]
    found = [at for at, mask in places(data) if mask & _COMMON == _COMMON and mask.bit_count() <= _MOST_BITS]
    if len(found) != 1:
        raise DeviceError(f"its code has {len(found) or 'no'} places that could be the gate of experimental features")
    return Gate(found[0], empty)


def _processor(data: bytes) -> str:
    """Return the processor of an ELF or PE file of 64 bits; empty for others."""
    if data[:5] == b"\x7fELF\x02" and len(data) >= 20:
        return {62: _X86_64, 183: _AARCH64}.get(struct.unpack_from("<H", data, 18)[0], "")
    if data[:2] == b"MZ" and len(data) >= 64:
        at = struct.unpack_from("<I", data, 60)[0]
        if data[at : at + 4] == b"PE\0\0" and len(data) >= at + 6:
            return {0x8664: _X86_64, 0xAA64: _AARCH64}.get(struct.unpack_from("<H", data, at + 4)[0], "")
    return ""


def _gates_x86_64(data: bytes) -> Iterator[tuple[int, int]]:
    """Offsets of such code, and the constant in each. Functions begin at multiples of 16."""
    before, between, behind = _X86_64_CODE
    for end in _places(data, behind):
        at = end - between - len(before) + 1
        if at % 16 == 0 and data[at - 1 : end - between] == before:
            yield at, int.from_bytes(data[end - between : end], "little") << 32


def _gates_aarch64(data: bytes) -> Iterator[tuple[int, int]]:
    for middle in _places(data, _AARCH64_ZERO):
        at = middle - 4
        if at % 4 or data[at - 4 : at] != _AARCH64_RET or data[at + 12 : at + 16] != _AARCH64_RET:
            continue
        movz, movk = (int.from_bytes(data[word : word + 4], "little") for word in (at, at + 8))
        if movz & 0xFFE0001F == 0xD2C00000 and movk & 0xFFE0001F == 0xF2E00000:
            yield at, ((movz >> 5 & 0xFFFF) << 32) | ((movk >> 5 & 0xFFFF) << 48)


def _places(data: bytes, word: bytes) -> Iterator[int]:
    at = data.find(word, 16)
    while at >= 0:
        yield at
        at = data.find(word, at + 1)
