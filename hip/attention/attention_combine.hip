// The shares of a split attention forward put together: o[b, t, h] = sum_s w_s o_s[b, t, h] / sum_s w_s with
// w_s = exp(lse_s - max_s lse_s), and lse = max_s lse_s + log sum_s w_s.
//
// parts: float32 [splits, B, T, H, D]; part_lse: float32 [splits, B, H, T], -1e30 where a share held no key that the
// query sees; o: [B, T, H, D] float16 or bfloat16 (to nearest even); lse: float32 [B, H, T]. rows = B T H, D a multiple
// of 4.
// Launch: ceil(rows D / 4 / 256) groups of 256; a work-item makes four neighbors of o, the first of a row its lse too.
// Source: Dao, FlashAttention-2 (arXiv:2307.08691), section 3.1 (rescaling partial results).
#include "attention_matrix.hpp"

namespace attention {

template <class T>
GPU_FN void combine(const float* parts, const float* part_lse, void* o, float* lse, int rows, int queries, int heads,
                    int width, int splits) {
  const long id = (long)gpu::block_x() * 256 + gpu::thread();
  const int fours = width / 4, row = int(id / fours), d = int(id % fours) * 4;
  if (row >= rows) return;
  const int head = row % heads, query = row / heads % queries, batch = row / heads / queries;
  const long place = ((long)batch * heads + head) * queries + query;
  float top = part_lse[place];
  for (int s = 1; s < splits; s++) top = __builtin_fmaxf(top, part_lse[(long)s * rows + place]);
  gpu::f32x4 sum = {0.f, 0.f, 0.f, 0.f};
  float total = 0.f;
  for (int s = 0; s < splits; s++) {
    const float weight = gpu::exp(part_lse[(long)s * rows + place] - top);
    total += weight;
    sum += weight * *(const gpu::f32x4*)(parts + ((long)s * rows + row) * width + d);
  }
  sum *= 1.f / total;
  *(u32x2*)((char*)o + ((long)row * width + d) * 2) = u32x2{T::result(sum[0], sum[1]), T::result(sum[2], sum[3])};
  if (d == 0) lse[place] = top + gpu::log(total);
}

}  // namespace attention

#define COMBINE(name, T)                                                                                               \
  extern "C" GPU_KERNEL(256) void name(const float* parts, const float* part_lse, void* o, float* lse, int rows,       \
                                       int queries, int heads, int width, int splits) {                                \
    attention::combine<attention::T>(parts, part_lse, o, lse, rows, queries, heads, width, splits);                    \
  }
COMBINE(attention_combine_f16, F16)
COMBINE(attention_combine_bf16, BF16<gpu::Round::RTNE>)
