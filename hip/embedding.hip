// Forward: y[n] = table[ids[n]]. Backward: dtable[v] = sum of dy[n] over the n with ids[n] = v, in rising order of n
// (dtable is zero before): the work-group of an id's first place adds up all of its places.
//   table [V, C], y, dy [N, C] f32, f16 or bf16 (types: table, y; or dy); ids [N] i32; dtable [V, C] f32.
// Launch: one work-group of 256 a token.
#include "elements.hpp"

using namespace gpu;

extern "C" GPU_KERNEL(256) void embedding(const void* table, const int* ids, void* y, u32 columns, u32 types) {
  u64 from = u64(u32(ids[block_x()])) * columns, to = u64(block_x()) * columns;
  bool aligned = columns % 8 == 0;
  for (u32 c = thread() * 8; c < columns; c += 2048) {
    Eight v = load8(table, type_of(types, 0), from + c, from + columns, aligned);
    store8(y, type_of(types, 1), to + c, to + columns, v, aligned);
  }
}

extern "C" GPU_KERNEL(256) void embedding_backward(const void* dy, const int* ids, float* dtable, u32 tokens,
                                                   u32 columns, u32 types) {
  GPU_SHARED(float, memory, 256 / GPU_WAVE);
  u32 own = block_x();
  int id = ids[own];
  float earlier = 0.f;
  for (u32 n = thread(); n < own; n += 256) earlier = ids[n] == id ? 1.f : earlier;
  if (block_max<256>(earlier, memory) > 0.f) return;
  for (u32 c = thread(); c < columns; c += 256) {
    float sum = 0.f;
    for (u32 n = own; n < tokens; n++)
      if (ids[n] == id) sum += load(dy, type_of(types, 0), u64(n) * columns + c);
    dtable[u64(u32(id)) * columns + c] = sum;
  }
}
