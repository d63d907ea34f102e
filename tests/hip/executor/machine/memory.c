// Memory accesses that tinygrad's emulator lacks (buffer descriptors on every architecture) or makes for lanes that are
// switched off too (LDS loads).
#include "machine.h"

typedef struct { int data, address, descriptor, offset_register, offset, by_address, store, bytes, accumulators, lanes, size; } Buffer;

// How many of the bytes at `at` lie in a buffer of `size` bytes; what lies beyond is read as zero and not written.
static u32 within(u64 at, u32 size, u32 bytes) {
  u64 left = at >= size ? 0 : size - at;
  return left >= bytes ? bytes : (u32)left & ~3u;  // the range check is made for each word
}

// buffer_load_* and buffer_store_* of whole words by a raw descriptor: no stride, no index.
int machine_buffer(u64* wave, void* parameters) {
  const Buffer* p = parameters;
  const u32 *s = scalars(wave), *d = s + p->descriptor, *addresses = registers(wave, 0);
  u32* data = registers(wave, p->accumulators) + p->data * p->lanes;
  u64 base = d[0] | (u64)(d[1] & 0xFFFF) << 32, on = active(wave, p->lanes);
  u32 origin = p->offset_register < 0 ? 0 : s[p->offset_register], words = p->bytes / 4;
  if (d[1] >> 16) return SWIZZLED;
  for (int lane = 0; lane < p->lanes; lane++) {
    if (!(on >> lane & 1)) continue;
    u64 at = (u64)origin + p->offset + (p->by_address ? addresses[p->address * p->lanes + lane] : 0);
    u32 moved[4] = {0}, inside = within(at, d[2], p->bytes);
    if (p->store) {
      for (u32 i = 0; i < words; i++) moved[i] = data[i * p->lanes + lane];
      memcpy((void*)(base + at), moved, inside);
    } else {
      memcpy(moved, (void*)(base + at), inside);
      for (u32 i = 0; i < words; i++) data[i * p->lanes + lane] = moved[i];
    }
  }
  advance(wave, p->size);
  return FINE;
}

typedef struct { int to, address, first, second, bytes, is_signed, size, lanes, accumulators; } LdsLoad;

static int fetch(const u8* lds, u32 at, const LdsLoad* p, u32* out) {
  if ((u64)at + p->bytes > (u64)p->size) return BEYOND_LDS;
  out[0] = 0;
  memcpy(out, lds + at, p->bytes);
  if (p->is_signed) out[0] = p->bytes == 1 ? (u32)(int8_t)out[0] : (u32)(int16_t)out[0];
  return FINE;
}

// One address, or two (second >= 0) at offsets of it.
int machine_lds_load(u64* wave, void* parameters) {
  const LdsLoad* p = parameters;
  const u32* addresses = registers(wave, 0) + p->address * p->lanes;
  u32* result = registers(wave, p->accumulators);
  const u8* lds = (const u8*)wave[LDS];
  int words = p->bytes < 4 ? 1 : p->bytes / 4, all = p->second < 0 ? words : 2 * words;
  u64 on = active(wave, p->lanes);
  for (int lane = 0; lane < p->lanes; lane++) {
    if (!(on >> lane & 1)) continue;
    u32 found[8], address = addresses[lane];
    if (fetch(lds, address + p->first, p, found)) return BEYOND_LDS;
    if (p->second >= 0 && fetch(lds, address + p->second, p, found + words)) return BEYOND_LDS;
    for (int i = 0; i < all; i++) result[(p->to + i) * p->lanes + lane] = found[i];
  }
  advance(wave, 8);
  return FINE;
}

typedef struct { int data, second_data, address, first, second, bytes, size, lanes; } LdsStore;

// From accumulators, to one address, or to two (second >= 0) at offsets of it.
int machine_lds_store(u64* wave, void* parameters) {
  const LdsStore* p = parameters;
  const u32 *addresses = registers(wave, 0) + p->address * p->lanes, *data = registers(wave, 1);
  u8* lds = (u8*)wave[LDS];
  u64 on = active(wave, p->lanes);
  for (int lane = 0; lane < p->lanes; lane++) {
    if (!(on >> lane & 1)) continue;
    for (int place = 0; place < (p->second < 0 ? 1 : 2); place++) {
      u32 at = addresses[lane] + (place ? p->second : p->first), from = place ? p->second_data : p->data;
      if ((u64)at + p->bytes > (u64)p->size) return BEYOND_LDS;
      for (int i = 0; i < p->bytes / 4; i++) memcpy(lds + at + 4 * i, data + (from + i) * p->lanes + lane, 4);
    }
  }
  advance(wave, 8);
  return FINE;
}
