// Instructions that tinygrad's emulator reads otherwise than the hardware: DPP, ds_bpermute, and conversions of float16
// on CDNA.
#include "machine.h"

// lane[l]: where lane l reads from, or -1; enabled: row_mask and bank_mask; zero: a lane without a source reads 0.
typedef struct {
  Entry plain;    // the same instruction without DPP, reading `borrowed`
  u64 plain_pc;
  int source, borrowed, lanes, zero, negate, absolute;
  int8_t lane[64];
  u8 enabled[64];
} Dpp;

// The plain form runs on a permuted copy of the first source, which a borrowed VGPR holds.
int machine_dpp(u64* wave, void* parameters) {
  const Dpp* p = parameters;
  u32 *s = scalars(wave), *v = registers(wave, 0), row[64], saved[64];
  u32 *source = v + p->source * p->lanes, *borrowed = v + p->borrowed * p->lanes;
  u64 on = active(wave, p->lanes), taking_part = 0, pc = pair(s, PC);
  for (int l = 0; l < p->lanes; l++) {
    int from = p->lane[l], valid = from >= 0 && (on >> from & 1);
    u32 x = valid ? source[from] : 0;
    if (p->absolute) x &= 0x7FFFFFFF;
    if (p->negate) x ^= 0x80000000;
    row[l] = x;
    if (p->enabled[l] && (valid || p->zero)) taking_part |= 1ull << l;
  }
  memcpy(saved, borrowed, 4 * p->lanes);
  memcpy(borrowed, row, 4 * p->lanes);
  u32 high = s[EXEC + 1];
  set_pair(s, EXEC, on & taking_part);
  set_pair(s, PC, p->plain_pc);
  call(&p->plain, wave);
  memcpy(borrowed, saved, 4 * p->lanes);
  set_pair(s, EXEC, on);
  if (p->lanes == 32) s[EXEC + 1] = high;
  set_pair(s, PC, pc + 8);
  return FINE;
}

typedef struct { int to, address, data, offset, lanes; } Bpermute;

// A lane's number is the address divided by 4, without the bits above; lanes that are off give 0.
int machine_bpermute(u64* wave, void* parameters) {
  const Bpermute* p = parameters;
  u32 *v = registers(wave, 0), found[64];
  u64 on = active(wave, p->lanes);
  for (int l = 0; l < p->lanes; l++) {
    u32 from = (v[p->address * p->lanes + l] + p->offset) / 4 % p->lanes;
    found[l] = on >> from & 1 ? v[p->data * p->lanes + from] : 0;
  }
  for (int l = 0; l < p->lanes; l++)
    if (on >> l & 1) v[p->to * p->lanes + l] = found[l];
  advance(wave, 8);
  return FINE;
}

typedef struct { int to, from, narrow, lanes; } Convert;

// v_cvt_f16_f32 (narrow) and v_cvt_f32_f16. Upper halves of results are zero (CDNA).
int machine_convert(u64* wave, void* parameters) {
  const Convert* p = parameters;
  u32* v = registers(wave, 0);
  u64 on = active(wave, p->lanes);
  for (int l = 0; l < p->lanes; l++) {
    if (!(on >> l & 1)) continue;
    u32 x = p->from >= FIRST_VGPR ? v[(p->from - FIRST_VGPR) * p->lanes + l] : scalars(wave)[p->from];
    v[p->to * p->lanes + l] = p->narrow ? to_half(as_float(x)) : as_bits(from_half((u16)x, 0));
  }
  advance(wave, 4);
  return FINE;
}

typedef struct { int to, low, high, lanes; } PackHalves;

// v_cvt_pk_f16_f32: two float32 to nearest, `high` in the upper half.
int machine_pack_halves(u64* wave, void* parameters) {
  const PackHalves* p = parameters;
  const u32* s = scalars(wave);
  u32* v = registers(wave, 0);
  u64 on = active(wave, p->lanes);
  for (int l = 0; l < p->lanes; l++) {
    if (!(on >> l & 1)) continue;
    u32 x = p->low >= FIRST_VGPR ? v[(p->low - FIRST_VGPR) * p->lanes + l] : s[p->low];
    u32 y = p->high >= FIRST_VGPR ? v[(p->high - FIRST_VGPR) * p->lanes + l] : s[p->high];
    v[p->to * p->lanes + l] = to_half(as_float(x)) | (u32)to_half(as_float(y)) << 16;
  }
  advance(wave, 8);
  return FINE;
}
