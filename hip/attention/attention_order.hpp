// Which queries a work-group takes, of a grid of (heads of all batch elements, blocks of queries times shares of keys).
//
// Work-groups start in the order of their numbers, x first, and the dies of a GPU take them in turn.
//   - Late queries see more keys. Their blocks come first, for all heads, so that the launch ends with short ones.
//   - Heads that share K and V go to one die, whose L2 then reads these once: of every row of the grid a die takes
//     neighboring heads, as many as the other dies or one more.
// tests/hip/executor/grid.py models the effect.
// Sources: AMD, CDNA3 white paper (work-groups go to the dies in turn); Graham 1969 (long jobs first).
#pragma once
#include "gpu.hpp"

namespace attention {

using gpu::u32;

struct Place {
  int head, batch, block, split;
};

GPU_FN Place place(int heads, int splits, int all_dies) {
  const u32 n = gpu::grid_x(), x = gpu::block_x(), y = gpu::block_y(), dies = u32(all_dies);
  // The row starts on die `from`; from there on `more` dies, around to die 0, take one head more than the others.
  const u32 from = n * y % dies, more = n % dies, end = from + more, die = (from + x) % dies;
  const u32 larger = gpu::min(gpu::max(die, from), end) - from + gpu::min(die, end > dies ? end - dies : 0u);
  const u32 pair = n / dies * die + larger + x / dies, blocks = gpu::grid_y() / u32(splits);
  return {int(pair % u32(heads)), int(pair / u32(heads)), int(blocks - 1 - y / u32(splits)), int(y % u32(splits))};
}

}  // namespace attention
