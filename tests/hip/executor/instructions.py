"""Instructions that C functions (machine/*.c) execute instead of tinygrad's emulator, and their parameters.

The words of an instruction are read where the fields are plain, LLVM's text elsewhere. What a kernel of ours does not
use is refused here: add it to the function that refuses, and to the C beside it.
"""

from __future__ import annotations

import ctypes
import re

from tests.hip.executor.code_object import ExecutorError, Instruction
from tests.hip.executor.machine import Bpermute, Buffer, Convert, LdsLoad, LdsStore, Mfma, PackHalves, Wmma

Override = tuple[str, ctypes.Structure | ctypes.c_int]  # a function of machine/*.c and its parameters

_TYPES = {"f16": 0, "bf16": 1, "f32": 2}
_MFMA = re.compile(r"v_mfma_f32_(16|32)x\1x(\d+)_?(f16|bf16|f32)(?:_1k)?$")
_WMMA = re.compile(r"v_wmma_f32_16x16x16_(f16|bf16)$")
_BUFFER = re.compile(r"buffer_(load|store)_(?:dword(x[234])?|b(32|64|96|128))$")
# RDNA's names and CDNA's: both addresses, in steps of 64, type.
_LDS_LOAD = re.compile(r"ds_(?:load|read)(_2addr|2)?(_stride64|st64)?_(u8|i8|u16|i16|b32|b64|b96|b128)$")
_LDS_STORE = re.compile(r"ds_write(2)?(st64)?_(b32|b64|b96|b128)$")
_LDS_BYTES = {"u8": 1, "i8": 1, "u16": 2, "i16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}
_CONVERT = re.compile(r"v_cvt_(?:f16_f32|f32_f16)_e32$")
# tinygrad takes 16-bit operands above v127 for upper halves of other registers: so it is on RDNA only.
_HIGH_HALF = re.compile(r"v_\w+_[fiub]16_(\w+_)?e32 .*\bv(12[89]|1[3-9]\d|2\d\d)\b")
# Of one GPU's caches, clocks and queues, which are not modeled.
_NO_EFFECT = re.compile(
    r"(buffer_(gl[01]_inv|inv|wbl2|wbinvl1(_vol)?)|global_(inv|wb)|s_(nop|sleep|setprio|clause|delay_alu|waitcnt\w*"
    r"|wait_\w+|inst_prefetch|set_inst_prefetch_distance|icache_inv|dcache_\w+|sendmsg|code_end|barrier_signal))$"
)


def override(found: Instruction, words: tuple[int, int], architecture: str, lanes: int, lds: int) -> Override | None:
    """Return the C function of an instruction; None for those of tinygrad's emulator. lds: bytes of a work-group.

    Raises:
        ExecutorError: a form of the instruction that the executor does not know.
    """
    name = found.name
    if name.startswith("v_mfma"):
        return "machine_mfma", _mfma(name, *words, architecture)
    if name.startswith("v_wmma"):
        return "machine_wmma_halves" if architecture.startswith("gfx12") else "machine_wmma", _wmma(name, *words)
    if _NO_EFFECT.match(name):
        return "machine_skip", ctypes.c_int(found.size)
    if name.startswith(("buffer_load", "buffer_store")):
        return "machine_buffer", _buffer(found, lanes)
    if match := _LDS_LOAD.match(name):
        return "machine_lds_load", _lds_load(match, *words, lanes, lds)
    if name.startswith("ds_write") and architecture.startswith("gfx9") and words[0] >> 25 & 1:
        return "machine_lds_store", _lds_store(found, *words, lanes, lds)
    if name == "ds_bpermute_b32":
        if architecture.startswith("gfx9") and words[0] >> 25 & 1:  # an accumulator
            raise _unknown(found.text)
        to, address, data = words[1] >> 24, words[1] & 0xFF, words[1] >> 8 & 0xFF
        return "machine_bpermute", Bpermute(to, address, data, words[0] & 0xFFFF, lanes)
    if _CONVERT.match(name) and architecture.startswith("gfx9") and words[0] & 0x1FF != 0xFF:  # 0xFF: a literal follows
        convert = Convert(words[0] >> 17 & 0xFF, words[0] & 0x1FF, "f16_f32" in name, lanes)
        return "machine_convert", convert
    if name == "v_cvt_pk_f16_f32":
        if low_fields := words[0] >> 8 & 0xFF or words[1] >> 18:  # clamp, modifiers, a third operand
            raise _unknown(f"{found.text} ({low_fields:#x})")
        return "machine_pack_halves", PackHalves(words[0] & 0xFF, words[1] & 0x1FF, words[1] >> 9 & 0x1FF, lanes)
    if architecture.startswith("gfx9") and _HIGH_HALF.match(found.text):
        raise _unknown(found.text)
    if re.search(r"atomic|^flat_|^scratch_|^ds_swizzle|^v_(smfmac|swmmac)|_lds_", name):
        raise _unknown(found.text)
    return None


def _unknown(text: str) -> ExecutorError:
    return ExecutorError(f"{text}: the executor does not know this form; add it to tests/hip/executor/instructions.py")


def _mfma(name: str, low: int, high: int, architecture: str) -> Mfma:
    match = _MFMA.match(name)
    if match is None or low >> 8 & 0x7F or high >> 29:  # broadcasts and negations
        raise _unknown(name)
    side, depth, kind = int(match[1]), int(match[2]), match[3]
    deep = architecture == "gfx950" and kind != "f32" and side * depth == 64 * 8
    if side * depth != 64 * (1 if kind == "f32" else 4) and not deep:  # a lane holds other numbers of elements
        raise _unknown(name)
    flush = architecture == "gfx90a" and kind != "f32"  # its tensor cores take 16-bit subnormals for zeros
    return Mfma(
        to=low & 0xFF, a=high & 0x1FF, b=high >> 9 & 0x1FF, c=high >> 18 & 0x1FF, to_accumulators=low >> 15 & 1,
        a_accumulators=high >> 27 & 1, b_accumulators=high >> 28 & 1, type=_TYPES[kind], side=side, depth=depth,
        flush=flush,
    )  # fmt: skip


def _wmma(name: str, low: int, high: int) -> Wmma:
    match = _WMMA.match(name)
    if match is None or high >> 29 or low >> 8 & 7:
        raise _unknown(name)
    return Wmma(low & 0xFF, high & 0x1FF, high >> 9 & 0x1FF, high >> 18 & 0x1FF, _TYPES[match[1]])


def _register(text: str) -> int:
    match = re.match(r"[asv]\[?(\d+)", text)
    if match is None:
        raise _unknown(text)
    return int(match[1])


def _buffer(found: Instruction, lanes: int) -> Buffer:
    text = found.text
    name, _, rest = text.partition(" ")
    match = _BUFFER.match(name)
    *operands, last = (part.strip() for part in rest.split(","))
    origin, *flags = last.split()
    if match is None or len(operands) != 3 or {"idxen", "lds"} & set(flags):
        raise _unknown(text)
    data, address, descriptor = operands
    constant = re.fullmatch(r"0|null", origin) is not None
    if not constant and not re.match(r"s\d", origin):
        raise _unknown(text)
    offset = next((int(f.partition(":")[2], 0) for f in flags if f.startswith("offset:")), 0)
    return Buffer(
        data=_register(data), address=0 if address == "off" else _register(address), descriptor=_register(descriptor),
        offset_register=-1 if constant else _register(origin), offset=offset, by_address="offen" in flags,
        store=match[1] == "store", bytes=int(match[3]) // 8 if match[3] else 4 * int((match[2] or "x1")[1:]),
        accumulators=data[0] == "a", lanes=lanes, size=found.size,
    )  # fmt: skip


def _lds_load(match: re.Match[str], low: int, high: int, lanes: int, lds: int) -> LdsLoad:
    both, strided, kind = match.groups()
    step = _LDS_BYTES[kind] * (64 if strided else 1)
    first, second = ((low & 0xFF) * step, (low >> 8 & 0xFF) * step) if both else (low & 0xFFFF, -1)
    return LdsLoad(
        to=high >> 24, address=high & 0xFF, first=first, second=second, bytes=_LDS_BYTES[kind],
        is_signed=kind[0] == "i", size=lds, lanes=lanes, accumulators=lanes == 64 and low >> 25 & 1,
    )  # fmt: skip


def _lds_store(found: Instruction, low: int, high: int, lanes: int, lds: int) -> LdsStore:
    """Store from accumulators to LDS: tinygrad's emulator reads the vector registers of their numbers."""
    match = _LDS_STORE.match(found.name)
    if match is None:
        raise _unknown(found.text)
    both, strided, kind = match.groups()
    step = _LDS_BYTES[kind] * (64 if strided else 1)
    first, second = ((low & 0xFF) * step, (low >> 8 & 0xFF) * step) if both else (low & 0xFFFF, -1)
    return LdsStore(
        data=high >> 8 & 0xFF, second_data=high >> 16 & 0xFF, address=high & 0xFF, first=first, second=second,
        bytes=_LDS_BYTES[kind], size=lds, lanes=lanes,
    )  # fmt: skip


def dpp_lanes(control: int, lanes: int, row_mask: int, bank_mask: int) -> tuple[list[int], list[bool]]:
    """Return where each lane reads from (-1: nowhere), and which are enabled. Source: AMD, CDNA3 and RDNA3 ISA, "DPP".

    Raises:
        ExecutorError: a control that the executor does not know.
    """
    sources, n = [], control & 15
    for lane in range(lanes):
        row, i = lane & ~15, lane & 15
        if control < 0x100:  # quad_perm
            source = lane & ~3 | control >> 2 * (lane & 3) & 3
        elif 0x101 <= control <= 0x10F:  # row_shl
            source = lane + n if i + n < 16 else -1
        elif 0x111 <= control <= 0x11F:  # row_shr
            source = lane - n if i >= n else -1
        elif 0x121 <= control <= 0x12F:  # row_ror
            source = row | (i - n) & 15
        elif control == 0x140:  # row_mirror
            source = row | 15 - i
        elif control == 0x141:  # row_half_mirror
            source = lane & ~7 | 7 - (lane & 7)
        elif control == 0x142 and lanes == 64:  # row_bcast:15
            source = row - 1
        elif control == 0x143 and lanes == 64:  # row_bcast:31
            source = 31 if lane >= 32 else -1
        else:
            raise _unknown(f"DPP control {control:#x}")
        sources.append(source)
    enabled = [bool(row_mask >> lane // 16 & bank_mask >> (lane & 15) // 4 & 1) for lane in range(lanes)]
    return sources, enabled
