// The forward's loop over keys on RDNA. A matrix instruction keeps its SIMD's vector unit busy, so that turns, as on
// CDNA, gain nothing: a wave does one thing after the other, and the others of its SIMD hide what it waits for.
//
//     K, V of tile t + 1: memory -> registers when tile t begins -> LDS buffer (t + 1) % 2 when it ends, V transposed
//                         as it is stored; one barrier per tile
//     K of tile t:        LDS buffer t % 2 -> operand A of S^T = K Q^T; Q is operand B, in registers from start to end
//     V of tile t:        LDS buffer t % 2 -> operand A of O^T = V^T P^T, the first read before the softmax
//     P:                  S^T leaves the tensor cores as operand B of the second matmul (attention_matrix.hpp)
#pragma once
#include "attention_softmax.hpp"

namespace attention {

// Both tiles have 128-bit slots; slot s of a row lies in place s ^ (row % 8), so that eight rows, read together, meet
// all banks. `own`: where a lane's row l % 16 begins, in a tile that begins at a multiple of 128 bytes.
GPU_FN u32 own_row(u32 bytes) { return u32(column()) * bytes + u32(column() % 8 ^ (GPU_RDNA3 ? 0 : group())) * 16; }
// A lane's INNER elements of slots `slot` (even) and the next, and `bytes` further: an operand.
GPU_FN Piece read_slots(const char* lds, u32 own, u32 slot, u32 bytes) {
  const auto at = [&](u32 s) { return *(const u32x4*)(lds + (own ^ s * 16) + bytes); };
#if GPU_RDNA3
  Piece p;
  p.lo = at(slot), p.hi = at(slot + 1);
  return p;
#else
  return at(slot);
#endif
}

// A tile of K as it lies in memory.
template <int D>
struct Along {
  static constexpr int ROW = D * 2, CHUNKS = D / 8, SLOTS = KEYS * CHUNKS, LOADS = SLOTS / THREADS;  // ROW: bytes
  static constexpr int ROWS = THREADS / CHUNKS;  // that all threads load at once
  static_assert(SLOTS % THREADS == 0 && ROWS % 8 == 0, "every thread loads as much, and into the same place of a row");
  u32x4 at[LOADS];

  // Bytes from the tile's start in memory and in LDS.
  GPU_FN static u32 source(u32 stride) { return gpu::thread() / CHUNKS * stride + gpu::thread() % CHUNKS * 16; }
  GPU_FN static u32 target() {
    const u32 row = gpu::thread() / CHUNKS;
    return row * ROW + (gpu::thread() % CHUNKS ^ row % 8) * 16;
  }
  GPU_FN void load(const Rows& rows, u32 from, u32 stride) {
#pragma unroll
    for (int i = 0; i < LOADS; i++) at[i] = rows.load16(from + i * ROWS * stride);
  }
  GPU_FN void store(char* to) const {
#pragma unroll
    for (int i = 0; i < LOADS; i++) *(u32x4*)(to + i * ROWS * ROW) = at[i];
  }
  GPU_FN static Piece read(const char* lds, u32 own, int rows16, int step) {
    return read_slots(lds, own, u32(step) * 2 % 8, u32(rows16) * 16 * ROW + u32(step) * 32 / 128 * 128);
  }
};

// A tile of V across: row c of LDS is column WIDE (c % 16) + c / 16 of the head, so that a lane's results lie together,
// and has the tile's keys, 16 at a time in the order of inner().
template <int D>
struct Across {
  static constexpr int WIDE = D / 16, FOUR = 4, ROW = KEYS * 2, SLOTS = D * ROW / 16;  // ROW: bytes
  static constexpr u32 APART = GPU_RDNA3 ? 2 : 1;                                      // keys from inner() to the next
  static_assert(THREADS * FOUR * WIDE == KEYS * D, "a thread transposes four keys by WIDE columns");
  u32 at[FOUR][WIDE / 2];

  // Of 16 lanes eight stand side by side in the head width, and two share a slot of LDS: 64-bit stores hit every bank.
  GPU_FN static u32 place(u32 thread) { return thread % 8 + thread / 16 % 2 * 8; }  // c % 16
  GPU_FN static u32 fours(u32 thread) { return thread / 8 % 2 + thread / 32 * 2; }
  GPU_FN static u32 source(u32 stride) {
    const u32 four = fours(gpu::thread()), in = four % 4;
    const u32 key = four / 4 * 16 + (GPU_RDNA3 ? in % 2 * 8 + in / 2 : in * 4);
    return key * stride + place(gpu::thread()) * (WIDE * 2);
  }
  GPU_FN static u32 target() {
    const u32 row = place(gpu::thread()), four = fours(gpu::thread());
    return row * ROW + (four / 2 ^ row % 8) * 16 + four % 2 * 8;
  }
  GPU_FN void load(const Rows& rows, u32 from, u32 stride) {
#pragma unroll
    for (int i = 0; i < FOUR; i++) load_words(at[i], rows, from + i * APART * stride);
  }
  GPU_FN void store(char* to) const {
#pragma unroll
    for (int j = 0; j < WIDE; j++) {
      const int w = j / 2;
      const auto halves = j % 2 ? high_halves : low_halves;
      *(u32x2*)(to + j * 16 * ROW) = u32x2{halves(at[0][w], at[1][w]), halves(at[2][w], at[3][w])};
    }
  }
  // Rows 16 j .. of 16 keys.
  GPU_FN static Piece read(const char* lds, u32 own, int keys16, int j) {
    return read_slots(lds, own, u32(keys16) * 2, u32(j) * 16 * ROW);
  }
};

template <class T, int D>
struct Forward : Softmax<T, D> {
  using Base = Softmax<T, D>;
  using Base::DEPTHS, Base::PIECES, Base::TILES, Base::q, Base::o;
  using K = Along<D>;
  using V = Across<D>;
  static constexpr u32 V_AT = K::SLOTS * 16, BUFFER = V_AT + V::SLOTS * 16;  // bytes
  static constexpr int SLOTS = 2 * BUFFER / 16;
  static_assert((BUFFER & (BUFFER - 1)) == 0, "one bit tells the buffers apart");
  static constexpr int OF_K = PARTS_K * DEPTHS, OF_V = PARTS_K * PIECES;  // operands of a step
  static constexpr int READS = 2;                                         // of them in flight from LDS

  Piece operand[READS + 1];
  K k;  // the next tile, in flight to LDS
  V v;
  u32 k_from, v_from;                                           // in memory, of the next tile
  u32 k_to = K::target(), v_to = V_AT + V::target();            // in the buffer that is written
  u32 k_own = own_row(K::ROW), v_own = V_AT + own_row(V::ROW);  // in the buffer that is read

  GPU_FN void load_k(const Rows& rows, u32 stride) { k.load(rows, k_from, stride), k_from += KEYS * stride; }
  GPU_FN void load_v(const Rows& rows, u32 stride) { v.load(rows, v_from, stride), v_from += KEYS * stride; }
  GPU_FN void store_k(u32x4* lds) { k.store((char*)lds + k_to), k_to ^= BUFFER; }
  GPU_FN void store_v(u32x4* lds) { v.store((char*)lds + v_to), v_to ^= BUFFER; }

  // The n-th operand of a step: K's, then V's.
  GPU_FN void read(const Walk& w, int step, int n) {
    const char* lds = (const char*)w.lds;
    const int m = n - OF_K;
    operand[n % (READS + 1)] = n < OF_K ? K::read(lds, k_own, PARTS_K * step + n / DEPTHS, n % DEPTHS)
                                        : V::read(lds, v_own, PARTS_K * step + m / PIECES, m % PIECES);
  }
  // S^T = K Q^T of a step, without the scale. The first of V are read during the last matrix instructions.
  GPU_FN void scores(Acc (&s)[PARTS_K][TILES], const Walk& w, int step) {
#pragma unroll
    for (int c = 0; c < READS; c++) read(w, step, c);
#pragma unroll
    for (int c = 0; c < OF_K; c++) {
      const int i = c / DEPTHS, d = c % DEPTHS;
      read(w, step, c + READS);
#pragma unroll
      for (int n = 0; n < TILES; n++)
        s[i][n] = mma(T{}, operand[c % (READS + 1)], q[n][d].at[0], d == 0 ? Acc(0.f) : s[i][n]);
      gpu::sched_fence();
    }
  }
  // O^T += V^T P^T of a step.
  GPU_FN void values(const Piece (&p)[PARTS_K][TILES], const Walk& w, int step) {
#pragma unroll
    for (int c = 0; c < OF_V; c++) {
      const int i = c / PIECES, j = c % PIECES;
      if (c + READS < OF_V) read(w, step, OF_K + c + READS);
#pragma unroll
      for (int n = 0; n < TILES; n++) o[j][n] = mma(T{}, operand[(OF_K + c) % (READS + 1)], p[i][n], o[j][n]);
      gpu::sched_fence();
    }
  }
  GPU_FN void step(const Walk& w, int at) {
    const int key0 = w.key0 + STEP * at;
    if (!w.mine.touches(key0, STEP)) return;
    Acc s[PARTS_K][TILES];
    Piece p[PARTS_K][TILES];
    scores(s, w, at);
    if (!w.mine.whole(key0, STEP)) this->hide(s, w, key0);
    this->softmax(s, p, w.scale);
    values(p, w, at);
  }

  GPU_FN void first_tile(const Rows& k_rows, const Rows& v_rows, u32x4* lds, int key0, u32 stride) {
    k_from = K::source(stride) + u32(key0) * stride, v_from = V::source(stride) + u32(key0) * stride;
    load_k(k_rows, stride), load_v(v_rows, stride);
    store_k(lds), store_v(lds);
    gpu::lds_barrier();
  }
  GPU_FN void walk(Walk& w, int end) {
#pragma unroll 1
    for (; w.key0 < end; w.key0 += KEYS) {
      load_k(w.k_rows, w.stride), load_v(w.v_rows, w.stride);
      step(w, 0);
      step(w, 1);
      store_k(w.lds), store_v(w.lds);
      gpu::lds_barrier();  // tile t is read, tile t + 1 is there
      k_own ^= BUFFER, v_own ^= BUFFER;
    }
  }
};

}  // namespace attention
