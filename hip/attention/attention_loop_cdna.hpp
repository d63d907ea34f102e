// The forward's loop over keys on CDNA: two waves of a SIMD take turns, one in matmuls and one at its softmax.
//
// Pipeline of a work-group of eight waves in two groups; wave w and w + 4 share a SIMD and are of different groups. A
// step is 32 keys, a tile of K two steps. Between two barriers one group is in matmuls and the other at its softmax:
//
//     early group | V P (i - 1), K Q^T i | softmax i            | V P i, K Q^T (i + 1)  | softmax (i + 1) ...
//     late group  | softmax (i - 1)      | V P (i - 1), K Q^T i | softmax i             | V P i, K Q^T (i + 1) ...
//
//     K tile t + 1: memory -> registers during the first K Q^T of tile t -> LDS buffer (t + 1) % 2 during the V P after
//                   it, by all waves together, 128 bits at a time; two barriers later the first wave reads it
//     K tile t:     LDS buffer t % 2 -> operand A of S^T = K Q^T; Q is operand B, in registers from start to end
//     V:            memory (L1: all waves read the same) -> registers during K Q^T, all of a step before its softmax,
//                   transposed there: operand A of O^T = V^T P^T
//     P:            S^T leaves the tensor cores as operand B of the second matmul: registers only
//     (attention_matrix.hpp)
// Source: Shah et al., FlashAttention-3 (arXiv:2407.08608, two groups).
#pragma once
#include "attention_pairs.hpp"
#include "attention_softmax.hpp"

namespace attention {

template <int D>
struct Keys {
  using K = Staged<KEYS, D, THREADS>;
  K k;  // the next tile of K, in flight to LDS
  int own = optimization_barrier(K::own_slot());
};

template <class T, int D>
struct Forward : Keys<D>, Softmax<T, D> {
  using Base = Softmax<T, D>;
  using Base::DEPTHS, Base::PIECES, Base::TILES, Base::q, Base::o;
  using Keys<D>::k, Keys<D>::own;
  using V = Transposed<D>;
  using typename Keys<D>::K;
  static constexpr int CHUNKS = PARTS_K * DEPTHS, SLOTS = 2 * K::SLOTS;
  static constexpr int READS = 2;  // chunks of K in flight from LDS
  static constexpr int STRETCHES = PARTS_K * PIECES;  // of matmuls with one operand of V

  Chunk a[READS + 1];  // of K: the first READS were read in the step before

  GPU_FN static int next(const Walk& w) { return K::SLOTS - w.now; }
  GPU_FN void read_first(const Walk& w, int buffer, int step) {
#pragma unroll
    for (int c = 0; c < READS; c++) a[c] = K::read(w.lds + buffer, own, PARTS_K * step + c / DEPTHS, c % DEPTHS);
  }
  // S^T = K Q^T of a step, without the scale; `beside(c)` is called during the c-th of CHUNKS groups of matrix
  // instructions.
  template <class F>
  GPU_FN void scores(Acc (&s)[PARTS_K][TILES], const Walk& w, int step, F beside) {
    const Acc zero = optimization_barrier(Acc(0.f));  // one for all: the compiler would make each its own
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const int i = c / DEPTHS, d = c % DEPTHS, next = c + READS;
      if (next < CHUNKS)
        a[next % (READS + 1)] = K::read(w.lds + w.now, own, PARTS_K * step + next / DEPTHS, next % DEPTHS);
      beside(c);
      this->score(s[i], a[c % (READS + 1)], d, zero);
      gpu::sched_fence();
    }
  }
  // O^T += V^T P^T of a step; `beside(j)` as in scores, of STRETCHES.
  template <class F>
  GPU_FN void values(const Piece (&p)[PARTS_K][TILES], const V (&v)[PARTS_K], F beside) {
    Piece piece = v[0].piece(0);
    gpu::sched_fence();
#pragma unroll
    for (int j = 0; j < STRETCHES; j++) {
      const int i = j / PIECES, next = j + 1;
      const Piece now = piece;
      if (next < STRETCHES) piece = v[next / PIECES].piece(next % PIECES);
#pragma unroll
      for (int n = 0; n < TILES; n++) o[j % PIECES][n] = mma(T{}, now, p[i][n], o[j % PIECES][n]);
      beside(j);
      gpu::sched_fence();
    }
  }

  template <int AT>  // 0 or 1: which step of the tile
  GPU_FN void step(const Walk& w) {
    const int key0 = w.key0 + STEP * AT, after = AT == 0 ? w.now : next(w);
    const u32 stride = uniform_barrier(w.stride);
    if (w.mine.touches(key0, STEP)) {
      V v[PARTS_K];
      Acc s[PARTS_K][TILES];
      Piece p[PARTS_K][TILES];
      scores(s, w, AT, [&](int c) {
        if (AT == 0 && c == 0) k.load(w.k_rows, w.key0 + KEYS, stride);
        if (c % DEPTHS == 0) v[c / DEPTHS].load(w.v_rows, u32(key0 + 16 * (c / DEPTHS)) * stride, stride, 0);
      });
      if (!w.mine.whole(key0, STEP)) this->hide(s, w, key0);
      meet();
      this->softmax(s, p, w.scale);
      meet();
      values(p, v, [&](int j) {
        if (AT == 0 && j == 1) k.store(w.lds + next(w));
        if (j == STRETCHES - 2) read_first(w, after, 1 - AT);
      });
    } else {
      if (AT == 0) {
        k.load(w.k_rows, w.key0 + KEYS, stride);
        k.store(w.lds + next(w));
      }
      meet();
      meet();
      read_first(w, after, 1 - AT);
    }
  }

  GPU_FN void first_tile(const Rows& k_rows, const Rows&, u32x4* lds, int key0, u32 stride) {
    k.load(k_rows, key0, stride);
    k.store(lds);
    gpu::lds_barrier();
  }
  GPU_FN void walk(Walk& w, int end) {
    if (w.late) gpu::lds_barrier();  // a phase behind the early ones
    read_first(w, 0, 0);
#pragma unroll 1
    for (; w.key0 < end; w.now = next(w), w.key0 += KEYS) {
      step<0>(w);
      step<1>(w);
    }
    if (!w.late) gpu::lds_barrier();
  }
};

}  // namespace attention
