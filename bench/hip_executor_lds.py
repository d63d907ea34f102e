"""LDS loads for the executor: its own read at the addresses of lanes that are switched off, and may fault there.

`install(kernel)` gives a kernel of run_hsaco.py loads that touch only what active lanes name, checked against the
work-group's LDS.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import tempfile
from functools import cache
from typing import Any

_OVERRIDE = 3  # kind of an entry whose function takes (registers, parameters)
_BYTES = {"u8": 1, "i8": 1, "u16": 2, "i16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}
# RDNA's names and CDNA's: both addresses, in steps of 64, kind.
_LOAD = re.compile(r"ds_(?:load|read)(_2addr|2)?(_stride64|st64)?_(u8|i8|u16|i16|b32|b64|b96|b128)$")
_SOURCE = r"""
#include <stdint.h>
#include <string.h>
typedef struct { int to, address, first, second, bytes, is_signed, size, lanes, accumulator; } Load;
static int fetch(const unsigned char* lds, uint32_t at, const Load* p, uint32_t* out) {
  if ((uint64_t)at + p->bytes > (uint64_t)p->size) return 100;
  out[0] = 0;
  memcpy(out, lds + at, p->bytes);
  if (p->is_signed) out[0] = p->bytes == 1 ? (uint32_t)(int8_t)out[0] : (uint32_t)(int16_t)out[0];
  return 0;
}
int wgrad_ds_load(uint64_t* registers, void* parameters) {
  const Load* p = parameters;
  uint32_t *scalar = (uint32_t*)registers[0], *vector = (uint32_t*)registers[1];
  uint32_t* result = p->accumulator ? (uint32_t*)registers[5] : vector;
  const unsigned char* lds = (const unsigned char*)registers[3];
  int words = p->bytes < 4 ? 1 : p->bytes / 4;
  for (int lane = 0; lane < p->lanes; lane++) {
    if (!(scalar[126 + lane / 32] >> lane % 32 & 1)) continue;
    uint32_t found[8], address = vector[p->address * p->lanes + lane];
    if (fetch(lds, address + p->first, p, found)) return 100;
    if (p->second >= 0 && fetch(lds, address + p->second, p, found + words)) return 100;
    for (int i = 0; i < words * (p->second >= 0 ? 2 : 1); i++) result[(p->to + i) * p->lanes + lane] = found[i];
  }
  uint64_t pc = (scalar[256] | (uint64_t)scalar[257] << 32) + 8;
  scalar[256] = pc, scalar[257] = pc >> 32;
  return 0;
}
"""


class _Load(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int) for name in "to address first second bytes is_signed size lanes accumulator".split()
    ]


@cache
def _function() -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "ds_load.so")
        compiler = os.environ.get("CC", "clang-19")
        subprocess.run(
            [compiler, "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", path], input=_SOURCE.encode(), check=True
        )
        library = ctypes.CDLL(path)
    address = ctypes.cast(library.wgrad_ds_load, ctypes.c_void_p).value
    assert address is not None
    return address


def install(kernel: Any) -> None:
    """Replace the LDS loads of a kernel."""
    compile_at = kernel.compile_at

    def compile_or_replace(pc: int) -> None:
        found = _LOAD.match(kernel.text_at(pc).split()[0])
        if found is None or " gds" in kernel.text_at(pc):
            compile_at(pc)
            return
        low, high = (ctypes.c_uint32.from_address(pc + 4 * i).value for i in (0, 1))
        both, wide, kind = found.groups()
        step = _BYTES[kind] * (64 if wide else 1)
        first, second = ((low & 0xFF) * step, (low >> 8 & 0xFF) * step) if both else (low & 0xFFFF, -1)
        accumulator = kernel.ws == 64 and low >> 25 & 1
        load = _Load(
            high >> 24, high & 0xFF, first, second, _BYTES[kind], kind[0] == "i", kernel.lds, kernel.ws, accumulator
        )  # fmt: skip
        kernel.keep.append(load)
        entry = kernel.tab[(pc - kernel.base) // 4]
        entry.fn, entry.params, entry.kind = _function(), ctypes.addressof(load), _OVERRIDE

    kernel.compile_at = compile_or_replace
