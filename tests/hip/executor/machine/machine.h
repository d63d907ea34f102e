// What the files of this folder share: the state of a wave as tinygrad's emulator keeps it, and conversions.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint64_t u64;
typedef uint32_t u32;
typedef uint16_t u16;
typedef uint8_t u8;

// Scalar registers by number; a register of 64 bits is two of them. A VGPR n is a row of lanes at n * lanes.
enum { EXEC = 126, PC = 256 };
enum { FIRST_VGPR = 256 };  // in an operand of nine bits: less is a scalar register or a constant
// A wave's memory, by what tinygrad's functions call it: addresses of SGPRs, VGPRs, (global: 0), LDS, scratch, AGPRs.
enum { SCALARS, VECTORS, GLOBAL, LDS, SCRATCH, ACCUMULATORS, BUFFERS };
// What an instruction that was carried out here may say; machine.py has the words.
enum { FINE = 0, NOT_REPLICATED = 1, LANES_OFF = 2, SWIZZLED = 3, BEYOND_LDS = 4 };

typedef int (*Override)(u64* wave, void* parameters);

// One word of code. kind: 0 not compiled yet, 1 tinygrad's function, 2 the same and a barrier, 3 an Override.
typedef struct {
  void* function;
  int kind, arguments, buffers[BUFFERS];
  void* parameters;
  u64 executed;
} Entry;

static inline u32* scalars(u64* wave) { return (u32*)wave[SCALARS]; }
static inline u32* registers(u64* wave, int accumulators) { return (u32*)wave[accumulators ? ACCUMULATORS : VECTORS]; }
static inline u64 pair(const u32* s, int at) { return s[at] | (u64)s[at + 1] << 32; }
static inline void set_pair(u32* s, int at, u64 value) { s[at] = (u32)value, s[at + 1] = (u32)(value >> 32); }
static inline u64 active(u64* wave, int lanes) { return lanes == 64 ? pair(scalars(wave), EXEC) : scalars(wave)[EXEC]; }
static inline void advance(u64* wave, int bytes) { set_pair(scalars(wave), PC, pair(scalars(wave), PC) + bytes); }

static inline float as_float(u32 x) { float f; memcpy(&f, &x, 4); return f; }
static inline u32 as_bits(float f) { u32 x; memcpy(&x, &f, 4); return x; }

static inline float from_half(u16 h, int flush) {
  _Float16 x;
  if (flush && !(h & 0x7C00)) h &= 0x8000;
  memcpy(&x, &h, 2);
  return (float)x;
}

static inline u16 to_half(float f) {  // to nearest even
  _Float16 x = (_Float16)f;
  u16 h;
  memcpy(&h, &x, 2);
  return h;
}

static inline float from_bfloat(u16 h, int flush) {
  if (flush && !(h & 0x7F80)) h &= 0x8000;
  return as_float((u32)h << 16);
}

// Calls tinygrad's function of an instruction, which moves the program counter itself.
static inline void call(const Entry* e, u64* wave) {
  u64 a[BUFFERS] = {0};
  for (int i = 0; i < e->arguments; i++) a[i] = wave[e->buffers[i]];
  ((void (*)(u64, u64, u64, u64, u64, u64))e->function)(a[0], a[1], a[2], a[3], a[4], a[5]);
}
