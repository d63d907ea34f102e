// The CPU half of gpu.hpp, for tests: every work-item is a fiber of the emulator (tests/hip/emulator), which sets
// `gpu_host_machine` after loading the shared object. A wave's lanes wait for each other at shuffles and
// matrix instructions, a work-group's at barriers; a missing lane is an error, as on a GPU the result would be wrong.
// Build: clang++ -shared -fPIC -Wno-psabi -DGPU_HOST=942 (or 910 for gfx90a, 1100, 1201).
//
// Layouts of the matrix instructions (lane l, element or result register r), D = A B + C:
//   mfma 16x16x16  A[l % 16][4 (l / 16) + r], B[4 (l / 16) + r][l % 16], D[4 (l / 16) + r][l % 16]
//   mfma 32x32x8   A[l % 32][4 (l / 32) + r], B[4 (l / 32) + r][l % 32], D[8 (r / 4) + 4 (l / 32) + r % 4][l % 32]
//   mfma 16x16x4   A[l % 16][l / 16], B[l / 16][l % 16], D as 16x16x16; 32x32x2 likewise by 32
//   wmma gfx11     A[l % 16][r], B[r][l % 16] (lanes 16 to 31 repeat 0 to 15), D[2 r + l / 16][l % 16]
//   wmma gfx12     A[l % 16][8 (l / 16) + r], B[8 (l / 16) + r][l % 16], D[8 (l / 16) + r][l % 16]
// Sources: AMD Instinct MI300 and RDNA3, RDNA4 instruction set references.
#pragma once

#define GPU_CDNA4 0  // gfx950 runs gfx942's kernels here
#if GPU_HOST == 910 || GPU_HOST == 942
#define GPU_CDNA 1
#define GPU_RDNA3 0
#define GPU_RDNA4 0
#define GPU_WAVE 64
#elif GPU_HOST == 1100
#define GPU_CDNA 0
#define GPU_RDNA3 1
#define GPU_RDNA4 0
#define GPU_WAVE 32
#elif GPU_HOST == 1201
#define GPU_CDNA 0
#define GPU_RDNA3 0
#define GPU_RDNA4 1
#define GPU_WAVE 32
#else
#error "GPU_HOST names the architecture to be: 910 (gfx90a), 942, 1100 or 1201"
#endif

// Inlining everything, as on a GPU, takes a third more of the compiler's time. Counted kernels need it all the same:
// one access of the source is then one instruction wherever the function is called.
#if defined(GPU_COUNTED)
#define GPU_FN __attribute__((always_inline)) inline
#else
#define GPU_FN inline
#endif
// A matrix instruction is a function of its own: in each unrolled step it would be most of what is compiled. What it
// does in memory is the emulator's, and not counted.
#define GPU_UNIT __attribute__((noinline, no_sanitize("coverage"))) inline
#define GPU_STRING_(x) #x
#define GPU_STRING(x) GPU_STRING_(x)
// The build of the tests finds kernels by this mark and appends a gpu_kernel_<name> (host::Kernel) for each.
#define GPU_KERNEL(threads) __attribute__((annotate("gpu_kernel:" GPU_STRING(threads))))
#define GPU_SHARED(type, name, count) \
  static const char gpu_key_##name = 0; \
  type* const name = static_cast<type*>(gpu_host_machine->shared(&gpu_key_##name, sizeof(type) * (count)))
#define GPU_WAVES_PER_SIMD(count)
#define GPU_CHECK_ALIGNED(p, bytes) \
  (reinterpret_cast<unsigned long>(p) % (bytes) ? gpu_host_machine->fail("an access is not aligned to its size") \
                                                : void())

// With GPU_COUNTED and clang's -fsanitize-coverage=trace-loads,trace-stores every access is reported to the emulator;
// `volatile` keeps the compiler from taking a wide one apart.
#if defined(GPU_COUNTED)
#define GPU_WHOLE volatile
#else
#define GPU_WHOLE
#endif

#include "gpu_types.hpp"

namespace gpu::host {

// What the emulator offers to a kernel. The layout is shared with tests/hip/emulator.
struct Machine {
  unsigned thread, block[3], grid[3];
  unsigned wave_size;
  // line: of the source, as the compiler may make several calls of one. all: for global memory too, not for LDS alone.
  void (*barrier)(unsigned line, bool all);
  // Leaves `bytes` of the calling lane, waits for the whole wave, and gives the table of what all lanes left (one every
  // SLOT bytes; of a lane that has ended, NaN). Valid until the lane's next meeting.
  const char* (*meet)(unsigned kind, const void* mine, unsigned bytes);
  void* (*shared)(const void* key, unsigned long bytes);
  void (*fail)(const char* message);
  // One load or store of one lane; `site` tells instructions apart. Called by kernels built with GPU_COUNTED alone.
  void (*access)(const void* address, unsigned bytes, bool store, const void* site);
};
constexpr unsigned SLOT = 128;

struct Kernel {
  const char* name;
  unsigned threads, arguments;
  const unsigned char* sizes;
  void (*invoke)(const char* packed);
};

}  // namespace gpu::host

extern "C" __attribute__((visibility("default"), weak)) gpu::host::Machine* gpu_host_machine = nullptr;
extern "C" __attribute__((visibility("default"), weak)) const unsigned gpu_host_arch = GPU_HOST;

#if defined(GPU_COUNTED)
#define GPU_COUNT(name, bytes, store)                                                                               \
  extern "C" __attribute__((visibility("hidden"), noinline, no_sanitize("coverage"))) inline void                    \
      __sanitizer_cov_##name(const void* p) {                                                                        \
    gpu_host_machine->access(p, bytes, store, __builtin_return_address(0));                                          \
  }                                                                                                                  \
  static const auto gpu_keep_##name __attribute__((used)) = __sanitizer_cov_##name;
GPU_COUNT(load1, 1, false)
GPU_COUNT(load2, 2, false)
GPU_COUNT(load4, 4, false)
GPU_COUNT(load8, 8, false)
GPU_COUNT(load16, 16, false)
GPU_COUNT(store1, 1, true)
GPU_COUNT(store2, 2, true)
GPU_COUNT(store4, 4, true)
GPU_COUNT(store8, 8, true)
GPU_COUNT(store16, 16, true)
#undef GPU_COUNT
#endif

namespace gpu {

GPU_FN unsigned thread() { return gpu_host_machine->thread; }
GPU_FN unsigned lane() { return thread() % GPU_WAVE; }
GPU_FN unsigned wave() { return thread() / GPU_WAVE; }
GPU_FN unsigned block_x() { return gpu_host_machine->block[0]; }
GPU_FN unsigned block_y() { return gpu_host_machine->block[1]; }
GPU_FN unsigned block_z() { return gpu_host_machine->block[2]; }
GPU_FN unsigned grid_x() { return gpu_host_machine->grid[0]; }
GPU_FN unsigned grid_y() { return gpu_host_machine->grid[1]; }
GPU_FN unsigned grid_z() { return gpu_host_machine->grid[2]; }

GPU_FN void barrier(unsigned line = __builtin_LINE()) { gpu_host_machine->barrier(line, true); }
GPU_FN unsigned low_halves(unsigned a, unsigned b) { return (a & 0xffffu) | b << 16; }
GPU_FN unsigned high_halves(unsigned a, unsigned b) { return a >> 16 | (b & 0xffff0000u); }
GPU_FN void local_barrier(unsigned line = __builtin_LINE()) { gpu_host_machine->barrier(line, false); }
GPU_FN void lds_barrier(unsigned line = __builtin_LINE()) { gpu_host_machine->barrier(line, false); }
GPU_FN void sched_fence() {}
template <class T>
GPU_FN T optimization_barrier(T x) {
  return x;
}
GPU_FN unsigned uniform_barrier(unsigned x) { return x; }

namespace host {
template <class T>
GPU_FN T read(const char* table, unsigned lane, unsigned offset = 0) {
  T value;
  __builtin_memcpy(&value, table + lane * SLOT + offset, sizeof(T));
  return value;
}
GPU_FN float number(float x) { return x; }
// The tensor cores of gfx90a take 16-bit operands and their sums for 0 where they are subnormal: below `least`.
GPU_FN float flushed(float x, float least) {
  return GPU_HOST == 910 && __builtin_fabsf(x) < least ? __builtin_copysignf(0.f, x) : x;
}
GPU_FN float number(_Float16 x) { return flushed(float(x), 0x1p-14f); }
GPU_FN float number(short x) {
  return flushed(__builtin_bit_cast(float, unsigned(static_cast<unsigned short>(x)) << 16), 0x1p-126f);
}

// Matmul of a wave: `row(lane, r)` is the row of a result register; `place` says where A[i][k] lies.
template <class E, class V, class C, class Row, class Place>
GPU_UNIT C product(unsigned kind, V a, V b, C c, unsigned side, unsigned depth, unsigned results, Row row,
                   Place place) {
  struct {
    V a, b;
  } mine = {a, b};
  static_assert(sizeof(mine) <= SLOT, "operands fit a slot");
  const char* table = gpu_host_machine->meet(kind, &mine, sizeof(mine));
  unsigned l = gpu::lane();
  for (unsigned r = 0; r < results; r++) {
    float sum = 0.f;
    for (unsigned k = 0; k < depth; k++) {
      auto [from_a, at] = place(row(l, r), k);
      auto [from_b, bt] = place(l % side, k);
      float x = number(read<E>(table, from_a, at * sizeof(E)));
      float y = number(read<E>(table, from_b, sizeof(V) + bt * sizeof(E)));
      sum += x * y;
    }
    c[r] = sizeof(E) == 2 ? flushed(c[r] + sum, 0x1p-126f) : c[r] + sum;
  }
  return c;
}
struct Where {
  unsigned lane, element;
};
}  // namespace host

template <class T>
GPU_FN T shuffle(T x, unsigned from) {
  return host::read<T>(gpu_host_machine->meet(2, &x, sizeof(T)), from % GPU_WAVE);
}
template <unsigned STEP, class T>
GPU_FN T partner(T x) {
  static_assert(STEP == 1 || STEP == 2 || STEP == 4 || STEP == 8, "lanes of a row of 16");
  return shuffle(x, lane() ^ (STEP < 4 ? STEP : 2 * STEP - 1));
}
template <class T>
GPU_FN T lane_value(T x, unsigned from) {
  return shuffle(x, from);
}
GPU_FN float lookup16(float table, unsigned codes, int at) { return shuffle(table, codes >> at & 15u); }
GPU_FN unsigned uniform(unsigned x) { return shuffle(x, 0); }

#if GPU_CDNA
#define GPU_MFMA(name, element, vector, result, side, depth, per, id)                                               \
  GPU_FN result name(vector a, vector b, result c) {                                                                 \
    return host::product<element>(                                                                                   \
        id, a, b, c, side, depth, side * side / 64,                                                                  \
        [](unsigned l, unsigned r) {                                                                                 \
          return side == 16 ? 4 * (l / 16) + r : 8 * (r / 4) + 4 * (l / 32) + r % 4;                                 \
        },                                                                                                           \
        [](unsigned i, unsigned k) { return host::Where{i + side * (k / per), k % per}; });                          \
  }
GPU_MFMA(mfma_f32_16x16x16_f16, _Float16, f16x4, f32x4, 16, 16, 4, 10)
GPU_MFMA(mfma_f32_16x16x16_bf16, short, bf16x4, f32x4, 16, 16, 4, 11)
GPU_MFMA(mfma_f32_32x32x8_f16, _Float16, f16x4, f32x16, 32, 8, 4, 12)
GPU_MFMA(mfma_f32_32x32x8_bf16, short, bf16x4, f32x16, 32, 8, 4, 13)
GPU_MFMA(mfma_f32_16x16x4_f32, float, float, f32x4, 16, 4, 1, 14)
GPU_MFMA(mfma_f32_32x32x2_f32, float, float, f32x16, 32, 2, 1, 15)
#undef GPU_MFMA
#endif
#if GPU_RDNA3
// Lanes l and l + 16 must hold the same row of A and column of B: for each half of D the hardware reads A's row from
// the lane of that half.
#define GPU_WMMA(name, element, vector, id)                                                                          \
  GPU_FN f32x8 name(vector a, vector b, f32x8 c) {                                                                   \
    unsigned half_wave = lane() / 16 * 16;                                                                           \
    return host::product<element>(                                                                                   \
        id, a, b, c, 16, 16, 8, [](unsigned l, unsigned r) { return 2 * r + l / 16; },                               \
        [half_wave](unsigned i, unsigned k) { return host::Where{i + half_wave, k}; });                              \
  }
GPU_WMMA(wmma_f32_16x16x16_f16, _Float16, f16x16, 20)
GPU_WMMA(wmma_f32_16x16x16_bf16, short, bf16x16, 21)
#undef GPU_WMMA
#endif
#if GPU_RDNA4
#define GPU_WMMA(name, element, vector, id)                                                                          \
  GPU_FN f32x8 name(vector a, vector b, f32x8 c) {                                                                   \
    return host::product<element>(                                                                                   \
        id, a, b, c, 16, 16, 8, [](unsigned l, unsigned r) { return 8 * (l / 16) + r; },                             \
        [](unsigned i, unsigned k) { return host::Where{i + 16 * (k / 8), k % 8}; });                                \
  }
GPU_WMMA(wmma_f32_16x16x16_f16, _Float16, f16x8, 22)
GPU_WMMA(wmma_f32_16x16x16_bf16, short, bf16x8, 23)
#undef GPU_WMMA
#endif

// ---- what the build appends for each kernel ------------------------------------------------------------------------
namespace host {
template <class T>
T take(const char* packed, unsigned long& at) {
  at = (at + alignof(T) - 1) / alignof(T) * alignof(T);
  T value;
  __builtin_memcpy(&value, packed + at, sizeof(T));
  at += sizeof(T);
  return value;
}
template <auto F>
struct Export;
template <class... A, void (*F)(A...)>
struct Export<F> {
  static constexpr unsigned char sizes[sizeof...(A) + 1] = {sizeof(A)..., 0};
  static void invoke(const char* packed) {
    unsigned long at = 0;
    struct Call {  // braces are evaluated in order
      Call(A... a) { F(a...); }
    };
    (void)at;
    Call{take<A>(packed, at)...};
  }
};
}  // namespace host
}  // namespace gpu
