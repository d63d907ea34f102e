// The powers of two that keep attention's gradient in float16's range.
//
// Range of float16: p and ds are small where a row sees many keys or the loss is not scaled. p is at most 1 and goes
// into products times 2^15. |g - delta| <= |do| |v| + |delta| bounds ds: a power of two takes the bound to between 2^14
// and 2^15, one for each query for dq, one for each work-group's keys for dk. Both leave with the result, exactly. The
// softmax's scale is applied to float32 results only. Where the matrix unit takes float16 subnormals for 0, do and v go
// into products lifted by up to 2^10, which makes normal numbers of all of them, as far as the longest row allows (the
// scales above stay what they are). bfloat16 has float32's range and needs none of this.
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
constexpr int P_SHIFT = 15;  // probabilities of float16 go into products times 2^P_SHIFT

// 2^n for -126 <= n <= 127.
GPU_FN float power_of_two(int n) { return gpu::bits_to_float(u32(n + 127) << 23); }
// n with bound 2^n between 2^14 and 2^15, within what float32 has room for.
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
