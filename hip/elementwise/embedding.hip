// Forward: y[n] = table[ids[n]]. Backward: dtable[v] = sum of dy[n] over the n with ids[n] = v, in rising order of n
// (dtable is zero before). embedding_chains links the positions of each id: heads[v] is the first (initially NONE),
// links[n] the next one after n (NONE at the end); embedding_backward sums each chain.
//   table [V, C], y, dy [N, C] f32, f16 or bf16 (types: table, y; or dy); ids [N] i32; dtable [V, C] f32; heads [V],
//   links [N] u32.
// Launch: embedding, embedding_backward one work-group of 256 per token; embedding_chains one work-group of 256, which
// goes through the tokens from the last to the first, 256 at a time.
#include "elements.hpp"

using namespace gpu;

constexpr u32 NONE = 0xffffffffu;

extern "C" GPU_KERNEL(256) void embedding(const void* table, const int* ids, void* y, u32 columns, u32 types) {
  u64 from = u64(u32(ids[block_x()])) * columns, to = u64(block_x()) * columns;
  bool aligned = columns % 8 == 0;
  for (u32 c = thread() * 8; c < columns; c += 2048) {
    Eight v = load8(table, type_of(types, 0), from + c, from + columns, aligned);
    store8(y, type_of(types, 1), to + c, to + columns, v, aligned);
  }
}

extern "C" GPU_KERNEL(256) void embedding_chains(const int* ids, u32* heads, u32* links, u32 tokens) {
  GPU_SHARED(int, seen, 256);
  GPU_SHARED(u32, follows, 256);  // an earlier place of these 256 has the same id
  for (u32 first = (tokens - 1) / 256 * 256 + 256; first > 0;) {
    first -= 256;
    u32 n = first + thread(), next = thread() + 1;
    int id = n < tokens ? ids[n] : -1;
    seen[thread()] = id, follows[thread()] = 0;
    barrier();
    while (next < 256 && seen[next] != id) next++;
    if (next < 256) follows[next] = 1;  // one writer: the nearest before it
    if (n < tokens) links[n] = next < 256 ? first + next : heads[id];
    barrier();  // the heads are read before they move
    if (n < tokens && !follows[thread()]) heads[id] = n;
    barrier();
  }
}

extern "C" GPU_KERNEL(256) void embedding_backward(const void* dy, const int* ids, const u32* heads, const u32* links,
                                                   float* dtable, u32 columns, u32 types) {
  u32 own = block_x(), id = u32(ids[own]);
  if (heads[id] != own) return;
  bool aligned = columns % 8 == 0;
  u64 to = u64(id) * columns;
  for (u32 c = thread() * 8; c < columns; c += 2048) {
    Eight sum = eight_zeros();
    for (u32 n = own; n != NONE; n = links[n]) {
      u64 from = u64(n) * columns;
      Eight v = load8(dy, type_of(types, 0), from + c, from + columns, aligned);
#pragma unroll
      for (u32 e = 0; e < 8; e++) sum.at[e] += v.at[e];
    }
    store8(dtable, F32, to + c, to + columns, sum, aligned);
  }
}
