// A short causal convolution of each channel: y = silu(z), or y = z without silu, with
//     z[t] = sum over taps j of x[t - j] weight[width - 1 - j]
//
// x, dx [batch, given, channels], whose last `tokens` tokens are those of y; weight [channels, width] f32; doc_start
// [batch, tokens] i32; cache_len [1]; y, dy [batch, tokens, channels]; sums f32 [runs, channels, width]: partial sums
// of the weight's gradient, over RUN tokens each. types: x, dy. A tap before x or before the token's document counts as
// 0.
// Launch: one work-item per element written; each row has work-groups of 256 of its own.
#include "elements.hpp"

using namespace gpu;

constexpr u32 RUN = 64;

struct Conv {
  const void *x, *dy;
  const float* weight;
  const int *doc_start, *cache_len;
  u32 batch, tokens, given, channels, width, silu, types;

  // How many tokens before token t count; negative where its document begins later.
  GPU_FN int reach(u32 b, u32 t) const {
    return min(int(t) + cache_len[0] - doc_start[u64(b) * tokens + t], int(t + given - tokens));
  }
  GPU_FN float tap(u32 b, u32 t, u32 c, u32 j) const {
    return load(x, type_of(types, 0), (u64(b) * given + t + given - tokens - j) * channels + c);
  }
  GPU_FN float at(u32 c, u32 j) const { return weight[u64(c) * width + width - 1 - j]; }
  GPU_FN float sum(u32 b, u32 t, u32 c) const {
    int seen = reach(b, t);
    float z = 0.f;
    for (u32 j = 0; j < width; j++)
      if (int(j) <= seen) z = gpu::fma(tap(b, t, c, j), at(c, j), z);
    return z;
  }
  GPU_FN static float sigmoid(float z) { return 1.f / (1.f + gpu::exp(min(-z, 87.f))); }
  // The gradient of z.
  GPU_FN float gradient(u32 b, u32 t, u32 c) const {
    float grad = load(dy, type_of(types, 1), (u64(b) * tokens + t) * channels + c);
    if (!silu) return grad;
    float z = sum(b, t, c), s = sigmoid(z);
    return grad * s * (1.f + z * (1.f - s));
  }
};

#define CONV_ARGUMENTS                                                                                                \
  const void *x, const void *dy, const float *weight, const int *doc_start, const int *cache_len, void *out, u32 batch, \
      u32 tokens, u32 given, u32 channels, u32 width, u32 silu, u32 types
#define CONV                                                                                             \
  Conv { x, dy, weight, doc_start, cache_len, batch, tokens, given, channels, width, silu, types }

// The row and the column that a work-item writes; every row takes ceil(columns / 256) work-groups.
struct Place {
  u32 row, at;

  GPU_FN explicit Place(u32 columns) {
    u32 groups = (columns + 255) / 256;
    row = block_x() / groups, at = block_x() % groups * 256 + thread();
  }
};

extern "C" GPU_KERNEL(256) void short_conv(CONV_ARGUMENTS) {
  const Conv conv = CONV;
  const Place place(channels);
  if (place.at >= channels) return;
  float z = conv.sum(place.row / tokens, place.row % tokens, place.at);
  store(out, type_of(types, 0), u64(place.row) * channels + place.at, silu ? z * Conv::sigmoid(z) : z);
}

extern "C" GPU_KERNEL(256) void short_conv_dx(CONV_ARGUMENTS) {
  const Conv conv = CONV;
  const Place place(channels);
  if (place.at >= channels) return;
  u32 b = place.row / given, e = place.row % given + tokens;  // of token e - given
  float grad = 0.f;
  for (u32 j = 0; j < width; j++) {
    if (e + j < given || e + j - given >= tokens) continue;
    u32 t = e + j - given;
    if (int(j) <= conv.reach(b, t)) grad = gpu::fma(conv.gradient(b, t, place.at), conv.at(place.at, j), grad);
  }
  store(out, type_of(types, 0), u64(place.row) * channels + place.at, grad);
}

extern "C" GPU_KERNEL(256) void short_conv_dweight(CONV_ARGUMENTS) {
  const Conv conv = CONV;
  const Place place(channels * width);
  if (place.at >= channels * width) return;
  u32 j = width - 1 - place.at % width, c = place.at / width, first = place.row * RUN;
  float sum = 0.f;
  for (u32 row = first; row < min(first + RUN, batch * tokens); row++) {
    u32 b = row / tokens, t = row % tokens;
    if (int(j) <= conv.reach(b, t)) sum = gpu::fma(conv.gradient(b, t, c), conv.tap(b, t, c, j), sum);
  }
  as<float>(out)[u64(place.row) * channels * width + place.at] = sum;
}
