// The powers of two that keep attention's gradient in float16's range.
//
// p and ds are small where a row sees many keys or the loss is not scaled. p <= 1 is multiplied by 2^15 before it is
// rounded. ds is bounded by |do| |v| + |delta|; a power of two takes that bound to between 2^14 and 2^15, one per query
// for dq, one per work-group's keys for dk. Both factors are divided out of the float32 result, exactly, and the
// softmax's scale is applied there too. Where the tensor cores take float16 subnormals for 0, do and v are also
// multiplied by up to 2^10, as far as the longest row allows, so that all of them become normal numbers. bfloat16 has
// float32's range and needs none of this.
#pragma once
#include "attention_matrix.hpp"

namespace attention {

template <class T>
struct Narrow {
  static constexpr bool YES = false;
};
template <>
struct Narrow<F16> {
  static constexpr bool YES = true;
};
constexpr int P_SHIFT = 15;  // float16 probabilities are multiplied by 2^P_SHIFT

// 2^n for -126 <= n <= 127.
GPU_FN float power_of_two(int n) { return gpu::bits_to_float(u32(n + 127) << 23); }
// n with bound 2^n between 2^14 and 2^15, within what float32 can hold.
GPU_FN int shift_for(float bound) {
  const int n = 14 + 127 - int(gpu::float_to_bits(bound) >> 23 & 255);
  return n < -100 ? -100 : n > 100 ? 100 : n;
}
// The power of two, 0 to 10, by which rows of at most this length are lifted; and as two halves of float16.
GPU_FN int lift_for(float length) {
  const int n = shift_for(length);
  return n < 0 ? 0 : n > 10 ? 10 : n;
}
GPU_FN u32 halves_of_two(int n) { return u32(n + 15) * 0x04000400u; }

}  // namespace attention
