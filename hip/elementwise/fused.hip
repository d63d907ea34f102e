// Elementwise expressions over broadcasting operands (device/expression.py), run by an interpreter, so that users need
// no compiler. A work-item computes one element; intermediate values are in LDS, one slot each.
//
// code, 32-bit words: two per instruction: function | slot of the result << 8, and the operands' slots, 8 bits each
// (numbers for load, scalar and index); then scalars; the sizes of the axes; strides of each array and of the output;
// offsets of each array and of the output. Reduced axes come last.
// types: four bits per array, then the output's: f32, f16, bf16, i32, u32.
// Launch: fused: ceil(n / 256) work-groups of 256. fused_reduce: a wave for each of n outputs and each chunk of `step`
// rows; with several chunks the output is [chunks, n].
// Sources: Cephes (Moshier) for sine and cosine.
#include "elements.hpp"
#include "softcap.hpp"

using namespace gpu;

constexpr u32 SLOTS = 32, ARRAYS = 7, AXES = 8;
enum Function {
  LOAD, SCALAR, INDEX, OLD, ADD, SUB, MUL, DIV, POW, MAXIMUM, MINIMUM, LT, LE, GT, GE, EQ, NE, WHERE, NEG, EXP, EXPM1, LOG,
  SQRT, ABS, SIGN, SIN, COS, RELU, TANH, SIGMOID, SOFTPLUS, SILU, SILU_SLOPE, GELU, GELU_SLOPE, GELU_EXACT,
  GELU_EXACT_SLOPE
};

GPU_FN float sigmoid(float x) { return 1.f / (1.f + gpu::exp(min(-x, 87.f))); }
GPU_FN float gelu_gate(float x) { return sigmoid(1.5957691216057308f * x * (1.f + 0.044715f * x * x)); }
GPU_FN float rounded_down(float x) { return __builtin_elementwise_floor(x); }
GPU_FN float silu_slope(float x) {
  float s = sigmoid(x);
  return s * (1.f + x * (1.f - s));
}
GPU_FN float gelu_slope(float x) {
  float s = gelu_gate(x);
  return s + x * s * (1.f - s) * (1.5957691216057308f * (1.f + 0.134145f * x * x));
}
// GELU with the normal distribution function, or its derivative, as in device/exact_gelu.py.
GPU_FN float gelu_exact(float x, bool slope) {
  float a = min(gpu::abs(x), 15.f), bell = gpu::exp(-0.5f * a * a), r = 1.f / (a + 3.5f), q = (a - 3.5f) * r;
  float p = 0.000108691447f * q + 0.000418320154f;
  p = (p * q - 0.000495038125f) * q - 0.00317282557f;
  p = (p * q + 0.00649372649f) * q + 0.0174058202f;
  p = (p * q - 0.116053175f) * q + 0.315425091f;
  p = (p * q - 0.565561739f) * q + 0.744416074f;
  float tail = bell * r * p, below = x < 0.f ? tail : 1.f - tail;
  return slope ? below + x * bell * 0.3989422804014327f : x * below;
}
// log(1 + e) of a small e from its series: 1 + e would have lost e's digits.
GPU_FN float softplus(float x) {
  float e = gpu::exp(-gpu::abs(x)), after = 0.25f - e * (0.2f - e * (1.f / 6.f - e / 7.f));
  float series = e * (1.f - e * (0.5f - e * (1.f / 3.f - e * after)));
  return max(x, 0.f) + (e < 0.1f ? series : gpu::log(1.f + e));
}
GPU_FN float exp_less_one(float x) {
  float series = x * (1.f + x * (0.5f + x * (0.16666667f + x * (0.041666668f + x * (0.008333334f + x * 0.0013888889f)))));
  return gpu::abs(x) < 0.3f ? series : gpu::exp(x) - 1.f;
}
// x to the y: of a negative x for whole y alone.
GPU_FN float power(float x, float y) {
  if (y == 0.f) return 1.f;
  if (x == 0.f) return y < 0.f ? __builtin_inff() : 0.f;
  float size = gpu::exp2(y * gpu::log(gpu::abs(x)) * 1.4426950408889634f);
  if (x > 0.f) return size;
  if (rounded_down(y) != y) return __builtin_nanf("");
  return rounded_down(y * 0.5f) * 2.f == y ? size : -size;
}
// Sine of x + quarter turns, for |x| below some thousands.
GPU_FN float sine(float x, u32 quarters) {
  float turns = rounded_down(x * 0.6366197723675814f + 0.5f);
  float r = gpu::fma(turns, -1.5703125f, x);
  r = gpu::fma(turns, -4.837512969970703125e-4f, r);
  r = gpu::fma(turns, -7.54978995489188216e-8f, r);
  u32 quarter = u32(int(turns)) + quarters;
  float z = r * r;
  float near = ((-1.9515295891e-4f * z + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * r + r;
  float far = ((2.443315711809948e-5f * z - 1.388731625493765e-3f) * z + 4.166664568298827e-2f) * z * z - 0.5f * z + 1.f;
  float found = quarter & 1 ? far : near;
  return quarter & 2 ? -found : found;
}

GPU_FN float load_any(const void* p, u32 type, u64 i) {
  if (type == 3) return float(as<int>(p)[i]);
  if (type == 4) return float(as<u32>(p)[i]);
  return load(p, type, i);
}
GPU_FN void store_any(void* p, u32 type, u64 i, float x) {
  if (type == 3) {
    as<int>(p)[i] = int(x);
  } else if (type == 4) {
    as<u32>(p)[i] = u32(x);
  } else {
    store(p, type, i, x);
  }
}

struct Program {
  const void* arrays[ARRAYS];
  void* out;
  const u32* code;
  u32 count, scalars, axes, loads, types;

  GPU_FN const u32* sizes() const { return code + 2 * count + scalars; }
  GPU_FN u64 place(u32 array, const u32 (&at)[AXES]) const {
    const u32 *strides = sizes() + axes * (1 + array), *offsets = sizes() + axes * (2 + loads);
    u64 i = offsets[array];
#pragma unroll
    for (u32 d = 0; d < AXES; d++)
      if (d < axes) i += u64(at[d]) * strides[d];
    return i;
  }
  // The coordinates of element i over axes [from, to), of which the last runs fastest.
  GPU_FN void split(u64 i, u32 from, u32 to, u32 (&at)[AXES]) const {
    from = uniform_barrier(from), to = uniform_barrier(to);  // or what follows from them fills the scalar registers
    u32 rest = u32(i);
#pragma unroll
    for (u32 back = 0; back < AXES; back++) {
      u32 d = AXES - 1 - back;
      if (d >= to || d < from) continue;
      u32 size = sizes()[d];
      at[d] = rest % size;
      rest /= size;
    }
  }
  // The value at these coordinates. values: a column of SLOTS, 256 apart.
  GPU_FN float value(const u32 (&at)[AXES], float* values) const {
    float x = 0.f;
#pragma unroll 1
    for (u32 n = 0; n < count; n++) {
      u32 head = code[2 * n], from = code[2 * n + 1], first = from & 255, function = head & 255;
      if (function == LOAD) {
        const void* p = arrays[0];
#pragma unroll
        for (u32 k = 1; k < ARRAYS; k++) p = first == k ? arrays[k] : p;
        x = load_any(p, type_of(types, first), place(first, at));
      } else if (function == SCALAR) {
        x = bits_to_float(code[2 * count + first]);
      } else if (function == INDEX) {
#pragma unroll
        for (u32 d = 0; d < AXES; d++) x = first == d ? float(at[d]) : x;
      } else if (function == OLD) {
        x = load_any(out, type_of(types, ARRAYS), place(loads, at));
      } else {
        x = apply(function, values[first * 256], values[(from >> 8 & 255) * 256], values[(from >> 16 & 255) * 256]);
      }
      values[(head >> 8) * 256] = x;
    }
    return x;
  }
  GPU_FN static float apply(u32 function, float a, float b, float c) {
    switch (function) {
      case ADD: return a + b;
      case SUB: return a - b;
      case MUL: return a * b;
      case DIV: return a / b;
      case POW: return power(a, b);
      case MAXIMUM: return max(a, b);
      case MINIMUM: return min(a, b);
      case LT: return a < b ? 1.f : 0.f;
      case LE: return a <= b ? 1.f : 0.f;
      case GT: return a > b ? 1.f : 0.f;
      case GE: return a >= b ? 1.f : 0.f;
      case EQ: return a == b ? 1.f : 0.f;
      case NE: return a != b ? 1.f : 0.f;
      case WHERE: return a != 0.f ? b : c;
      case NEG: return -a;
      case EXP: return gpu::exp(a);
      case EXPM1: return exp_less_one(a);
      case LOG: return gpu::log(a);
      case SQRT: return gpu::sqrt(a);
      case ABS: return gpu::abs(a);
      case SIGN: return a > 0.f ? 1.f : a < 0.f ? -1.f : a;
      case SIN: return sine(a, 0);
      case COS: return sine(a, 1);
      case RELU: return max(a, 0.f);
      case TANH: return capped(a, 1.f);
      case SIGMOID: return sigmoid(a);
      case SOFTPLUS: return softplus(a);
      case SILU: return a * sigmoid(a);
      case SILU_SLOPE: return silu_slope(a);
      case GELU: return a * gelu_gate(a);
      case GELU_SLOPE: return gelu_slope(a);
      default: return gelu_exact(a, function == GELU_EXACT_SLOPE);
    }
  }
};

#define PROGRAM_ARGUMENTS                                                                                             \
  const void *a0, const void *a1, const void *a2, const void *a3, const void *a4, const void *a5, const void *a6,     \
      void *out, const u32 *code, u32 count, u32 scalars, u32 axes, u32 loads, u32 types, u32 accumulate
#define PROGRAM                                                                                                       \
  Program { {a0, a1, a2, a3, a4, a5, a6}, out, code, count, scalars, axes, loads, types }

extern "C" GPU_KERNEL(256) void fused(PROGRAM_ARGUMENTS, u32 n) {
  GPU_SHARED(float, values, SLOTS * 256);
  const Program p = PROGRAM;
  u32 i = block_x() * 256 + thread();
  if (i >= n) return;
  u32 at[AXES] = {};
  p.split(i, 0, axes, at);
  float x = p.value(at, values + thread());
  u64 to = p.place(loads, at);
  u32 type = type_of(types, ARRAYS);
  store_any(out, type, to, accumulate ? x + load_any(out, type, to) : x);
}

// kind: 1 sum, 2 maximum. kept: the number of axes of the output.
extern "C" GPU_KERNEL(256) void fused_reduce(PROGRAM_ARGUMENTS, u32 n, u32 rows, u32 step, u32 kept, u32 kind) {
  GPU_SHARED(float, values, SLOTS * 256);
  const Program p = PROGRAM;
  u32 item = block_x() * (256 / GPU_WAVE) + wave(), chunk = item / n, place = item % n;
  u32 first = chunk * step;
  if (first >= rows) return;
  u32 at[AXES] = {};
  p.split(place, 0, kept, at);
  float found = kind == 1 ? 0.f : -__builtin_inff();
  for (u32 r = first + lane(); r < min(first + step, rows); r += GPU_WAVE) {
    p.split(r, kept, axes, at);
    float x = p.value(at, values + thread());
    found = kind == 1 ? found + x : max(found, x);
  }
  found = kind == 1 ? wave_sum(found) : wave_max(found);
  if (lane() != 0) return;
  u32 type = type_of(types, ARRAYS);
#pragma unroll
  for (u32 d = 0; d < AXES; d++) at[d] = d < kept ? at[d] : 0;
  u64 to = step < rows ? u64(chunk) * n + place : p.place(loads, at);
  store_any(out, type, to, accumulate ? found + load_any(out, type, to) : found);
}
