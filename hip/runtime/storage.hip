// fill: out = the 32-bit pattern `word`, repeated; copy: out = in. Both count bytes.
//   out, in [bytes] on addresses that are multiples of 16.
// copy_columns: rows of `units` pairs of bytes from rows that are in_row pairs long to rows that are out_row long.
// Launch: ceil(bytes / 4096) work-groups of 256, 16 bytes per work-item; the last bytes one by one.
#include "gpu.hpp"

using namespace gpu;

extern "C" GPU_KERNEL(256) void fill(u8* out, u32 word, u64 bytes) {
  u64 at = (u64(block_x()) * 256 + thread()) * 16;
  if (at + 16 <= bytes) {
    store16(out + at, u32x4{word, word, word, word});
  } else {
    for (; at < bytes; at++) out[at] = u8(word >> (at % 4 * 8));
  }
}

extern "C" GPU_KERNEL(256) void copy(const u8* in, u8* out, u64 bytes) {
  u64 at = (u64(block_x()) * 256 + thread()) * 16;
  if (at + 16 <= bytes) {
    store16(out + at, load16(in + at));
  } else {
    for (; at < bytes; at++) out[at] = in[at];
  }
}

extern "C" GPU_KERNEL(256) void copy_columns(const u16* in, u16* out, u64 total, u32 units, u32 in_row, u32 out_row) {
  u64 at = u64(block_x()) * 256 + thread();
  if (at >= total) return;
  u64 row = at / units, unit = at % units;
  out[row * out_row + unit] = in[row * in_row + unit];
}
