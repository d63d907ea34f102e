// The forward's loop over keys for heads of 256: two neighboring waves have the same queries, and half of the width
// each: of Q, K and V, and so of the result. Each makes a part of S^T, hands it to the other through LDS before the
// barrier that there is anyway, and adds the other's to its own behind it (attention_pairs.hpp). Both do the softmax,
// on the same bits.
//
// The work-group's waves are in two groups a barrier apart, as in attention_loop_cdna.hpp, but a tile of K is one step:
//
//     K tile t + 1: memory -> registers beside V P of tile t - 1 -> LDS buffer (t + 1) % 2 beside K Q^T of tile t: the
//                   late group stores when the early one is at its softmax, and that reads it behind the next barrier
//     V:            memory -> registers, transposed there: on CDNA beside K Q^T, all of a step before its softmax; on
//                   RDNA, with fewer registers, as V P goes on
#pragma once
#include "attention_pairs.hpp"
#include "attention_softmax.hpp"

namespace attention {

template <class T>
struct Forward<T, 256> : Softmax<T, 256> {
  using Base = Softmax<T, 256>;
  using S = Shape<256>;
  using Base::DEPTHS, Base::PIECES, Base::TILES, Base::q, Base::o;
  using V = Transposed<S::WIDTH>;
  using K = Staged<S::TILE_KEYS, 256, THREADS>;
  static_assert(S::TILE_KEYS == STEP, "a tile is a step");
  // LDS: K twice, and what each wave hands over of a step.
  static constexpr int HANDED = PARTS_K * TILES * HANDED_TILE, SLOTS = 2 * K::SLOTS + WAVES * HANDED;
  static constexpr int CHUNKS = PARTS_K * DEPTHS, READS = GPU_CDNA ? 4 : 1;  // READS: in flight from LDS
  // Loads of V in a step, and how many of them are in registers at once, fetched beside the scores.
  static constexpr int STEPS_V = PARTS_K * V::PARTS, AHEAD = GPU_CDNA ? STEPS_V : 1;
  static constexpr int STRETCHES = STEPS_V * V::WIDE;  // of products with one operand of V

  K k;  // the next tile of K, in flight to LDS
  int own = optimization_barrier(K::own_slot()) + S::first_element() / 8;
  Chunk a[READS + 1];  // of K: the first READS were read in the step before

  GPU_FN static int next(const Walk& w) { return K::SLOTS - w.now; }
  GPU_FN void read_chunk(const Walk& w, int buffer, int c) {
    a[c % (READS + 1)] = K::read(w.lds + buffer, own, c / DEPTHS, c % DEPTHS);
  }
  GPU_FN void read_first(const Walk& w, int buffer) {
#pragma unroll
    for (int c = 0; c < READS; c++) read_chunk(w, buffer, c);
  }
  // S^T = K Q^T, of my half of the width; `beside(c)` is called during the c-th of CHUNKS groups of matrix
  // instructions.
  template <class F>
  GPU_FN void scores(Acc (&s)[PARTS_K][TILES], const Walk& w, F beside) {
    const Acc zero = optimization_barrier(Acc(0.f));  // one for all: the compiler would make each its own
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const int i = c / DEPTHS, d = c % DEPTHS;
      if (c + READS < CHUNKS) read_chunk(w, w.now, c + READS);
      gpu::sched_fence();
      beside(c);
      this->score(s[i], a[c % (READS + 1)], d, zero);
      gpu::sched_fence();
    }
  }
  GPU_FN static void load_values(V& v, const Walk& w, u32 stride, int step) {
    v.load(w.v_rows, u32(w.key0 + 16 * (step / V::PARTS)) * stride, stride, step % V::PARTS);
  }
  // O^T += V^T P^T; `beside(j)` as in scores, of STRETCHES.
  template <class F>
  GPU_FN void values(const Piece (&p)[PARTS_K][TILES], V (&v)[AHEAD], const Walk& w, u32 stride, F beside) {
    Piece piece = v[0].piece(0);
    gpu::sched_fence();
#pragma unroll
    for (int j = 0; j < STRETCHES; j++) {
      const int load = j / V::WIDE;
      const Piece now = piece;
      if (AHEAD > 1 && j + 1 < STRETCHES) piece = v[(j + 1) / V::WIDE % AHEAD].piece((j + 1) % V::WIDE);
#pragma unroll
      for (int n = 0; n < TILES; n++) {
        Acc& to = o[load % V::PARTS * V::WIDE + j % V::WIDE][n];
        to = mma(T{}, now, p[load / V::PARTS][n], to);
      }
      beside(j);
      gpu::sched_fence();
      const bool used_up = j % V::WIDE == V::WIDE - 1;
      if (used_up && load + AHEAD < STEPS_V) load_values(v[load % AHEAD], w, stride, load + AHEAD);
      if (AHEAD == 1 && j + 1 < STRETCHES) piece = v[0].piece((j + 1) % V::WIDE);
    }
  }
  // Score tile t of a step, of wave `of`, handed to the other wave of the pair.
  GPU_FN static u32x4* handed(const Walk& w, u32 of, int t) {
    return w.lds + 2 * K::SLOTS + of * HANDED + t * HANDED_TILE;
  }
  GPU_FN void step(const Walk& w) {
    const u32 stride = uniform_barrier(w.stride);
    const bool touched = w.mine.touches(w.key0, STEP);
    V v[AHEAD];
    Piece p[PARTS_K][TILES];
    if (touched) {
      Acc s[PARTS_K][TILES];
      scores(s, w, [&](int c) {
        if (c % (CHUNKS / AHEAD) == 0) load_values(v[c / (CHUNKS / AHEAD)], w, stride, c / (CHUNKS / AHEAD));
        if (c == 1) k.store(w.lds + next(w));
        // What is complete goes early.
        if (c >= DEPTHS && c < DEPTHS + TILES) hand_over(handed(w, gpu::wave(), c - DEPTHS), s[0][c - DEPTHS]);
      });
#pragma unroll
      for (int n = 0; n < TILES; n++) hand_over(handed(w, gpu::wave(), TILES + n), s[1][n]);
      meet();
#pragma unroll
      for (int t = 0; t < PARTS_K * TILES; t++)
        add_handed(s[t / TILES][t % TILES], handed(w, gpu::wave() ^ 1u, t));
      if (!w.mine.whole(w.key0, STEP)) this->hide(s, w, w.key0);
      this->softmax(s, p, w.scale);
    } else {
      k.store(w.lds + next(w));
      meet();
    }
    meet();
    // Where all waves pass: what is in flight from one step to the next would be copied, and so waited for, where two
    // branches meet.
    k.load(w.k_rows, w.key0 + 2 * STEP, stride);
    if (touched) {
      values(p, v, w, stride, [&](int j) {
        if (j == STRETCHES - 2) read_first(w, next(w));
      });
    } else {
      read_first(w, next(w));
    }
  }

  GPU_FN void first_tile(const Rows& k_rows, const Rows&, u32x4* lds, int key0, u32 stride) {
    k.load(k_rows, key0, stride);
    k.store(lds);
    k.load(k_rows, key0 + STEP, stride);
    gpu::lds_barrier();
  }
  GPU_FN void walk(Walk& w, int end) {
    if (w.late) gpu::lds_barrier();  // a phase behind the early ones
    read_first(w, 0);
#pragma unroll 1
    for (; w.key0 < end; w.now = next(w), w.key0 += STEP) step(w);
    if (!w.late) gpu::lds_barrier();
  }
};

}  // namespace attention
