// Products on the tensor cores. Sums are made in double and rounded once.
// Layouts: AMD, CDNA3 and CDNA4 ISA 7.1 (MFMA), RDNA3 ISA 7.9 and RDNA4 ISA 7.12 (WMMA).
#include "machine.h"

enum { F16, BF16, F32 };

typedef struct { int to, a, b, c, to_accumulators, a_accumulators, b_accumulators, type, side, depth, flush; } Mfma;

static double element(const u32* file, int row, int lane, int type, int e, int flush) {
  if (type == F32) return as_float(file[(row + e) * 64 + lane]);
  u16 h = file[(row + e / 2) * 64 + lane] >> 16 * (e & 1);
  return type == F16 ? from_half(h, flush) : from_bfloat(h, flush);
}

// d[i][j] = c[i][j] + sum over k of a[i][k] b[k][j]; side x side results, 16 or 32. All lanes, whatever EXEC says.
int machine_mfma(u64* wave, void* parameters) {
  const Mfma* p = parameters;
  const u32* s = scalars(wave);
  const u32 *file_a = registers(wave, p->a_accumulators), *file_b = registers(wave, p->b_accumulators);
  u32* file_d = registers(wave, p->to_accumulators);
  double a[32][32], b[32][32];
  int groups = 64 / p->side, each = p->depth / groups, results = p->side * p->side / 64;
  for (int lane = 0; lane < 64; lane++)
    for (int e = 0; e < each; e++) {
      int i = lane % p->side, k = lane / p->side * each + e;
      a[i][k] = element(file_a, p->a - FIRST_VGPR, lane, p->type, e, p->flush);
      b[i][k] = element(file_b, p->b - FIRST_VGPR, lane, p->type, e, p->flush);
    }
  u32 d[16 * 64];
  for (int r = 0; r < results; r++)
    for (int lane = 0; lane < 64; lane++) {
      int i = p->side == 32 ? 8 * (r / 4) + 4 * (lane / 32) + r % 4 : 4 * (lane / 16) + r, j = lane % p->side;
      double sum = as_float(p->c >= FIRST_VGPR ? file_d[(p->c - FIRST_VGPR + r) * 64 + lane] : s[p->c]);
      for (int k = 0; k < p->depth; k++) sum += a[i][k] * b[j][k];
      d[r * 64 + lane] = as_bits((float)sum);
    }
  memcpy(file_d + p->to * 64, d, (size_t)results * 64 * 4);
  advance(wave, 8);
  return FINE;
}

typedef struct { int to, a, b, c, type; } Wmma;

// 16 x 16 x 16 into float32, wave32. Lanes 16-31 must hold copies of the operands of lanes 0-15.
int machine_wmma(u64* wave, void* parameters) {
  const Wmma* p = parameters;
  const u32* s = scalars(wave);
  u32* file = registers(wave, 0);
  double a[16][16], b[16][16];
  if (s[EXEC] != 0xFFFFFFFF) return LANES_OFF;
  for (int r = 0; r < 8; r++) {
    const u32 *row_a = file + (p->a - FIRST_VGPR + r) * 32, *row_b = file + (p->b - FIRST_VGPR + r) * 32;
    for (int lane = 0; lane < 16; lane++) {
      if (row_a[lane] != row_a[lane + 16] || row_b[lane] != row_b[lane + 16]) return NOT_REPLICATED;
      for (int half = 0; half < 2; half++) {
        u16 x = row_a[lane] >> 16 * half, y = row_b[lane] >> 16 * half;
        a[lane][2 * r + half] = p->type == F16 ? from_half(x, 0) : from_bfloat(x, 0);
        b[lane][2 * r + half] = p->type == F16 ? from_half(y, 0) : from_bfloat(y, 0);
      }
    }
  }
  u32 d[8 * 32];
  for (int r = 0; r < 8; r++)
    for (int lane = 0; lane < 32; lane++) {
      double sum = 0;
      for (int k = 0; k < 16; k++) sum += a[2 * r + lane / 16][k] * b[lane % 16][k];
      u32 c = p->c >= FIRST_VGPR ? file[(p->c - FIRST_VGPR + r) * 32 + lane] : s[p->c];
      d[r * 32 + lane] = as_bits((float)(sum + as_float(c)));
    }
  memcpy(file + p->to * 32, d, sizeof d);
  advance(wave, 8);
  return FINE;
}

// The same on RDNA4: a lane holds 8 of the 16 elements that a row of A or a column of B has along k, lanes 0-15 the first
// 8 and lanes 16-31 the others (only that A and B agree changes a result); and of D rows 0-7 or 8-15 of its column.
int machine_wmma_halves(u64* wave, void* parameters) {
  const Wmma* p = parameters;
  const u32* s = scalars(wave);
  u32* file = registers(wave, 0);
  double a[16][16], b[16][16];
  if (s[EXEC] != 0xFFFFFFFF) return LANES_OFF;
  for (int lane = 0; lane < 32; lane++)
    for (int e = 0; e < 8; e++) {
      u16 x = file[(p->a - FIRST_VGPR + e / 2) * 32 + lane] >> 16 * (e & 1);
      u16 y = file[(p->b - FIRST_VGPR + e / 2) * 32 + lane] >> 16 * (e & 1);
      int i = lane % 16, k = 8 * (lane / 16) + e;
      a[i][k] = p->type == F16 ? from_half(x, 0) : from_bfloat(x, 0);
      b[i][k] = p->type == F16 ? from_half(y, 0) : from_bfloat(y, 0);
    }
  u32 d[8 * 32];
  for (int r = 0; r < 8; r++)
    for (int lane = 0; lane < 32; lane++) {
      double sum = as_float(p->c >= FIRST_VGPR ? file[(p->c - FIRST_VGPR + r) * 32 + lane] : s[p->c]);
      for (int k = 0; k < 16; k++) sum += a[8 * (lane / 16) + r][k] * b[lane % 16][k];
      d[r * 32 + lane] = as_bits((float)sum);
    }
  memcpy(file + p->to * 32, d, sizeof d);
  advance(wave, 8);
  return FINE;
}
