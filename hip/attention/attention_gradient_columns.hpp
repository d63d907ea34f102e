// The owned rows of attention's gradient, the columns of every matmul: their masks, probabilities and results.
// attention_gradient.hpp defines the names.
#pragma once
#include "attention_operands.hpp"
#include "attention_range.hpp"
#include "attention_walk.hpp"

namespace attention {

// x is the same in all lanes: into a scalar register.
GPU_FN float uniform(float x) { return gpu::bits_to_float(gpu::uniform(gpu::float_to_bits(x))); }
GPU_FN int uniform(int x) { return int(gpu::uniform(u32(x))); }

template <class T, int D, bool KEYS>
struct GradientColumns {
  using S = Share<D>;
  static constexpr int TILES = S::TILES, WAVE_COLUMNS = S::WAVE_COLUMNS, COLUMNS = S::COLUMNS;
  static constexpr int DEPTHS = S::WIDTH / DEPTH, PIECES = S::WIDTH / 16;
  static constexpr bool NARROW = Narrow<T>::YES, LIFTS = NARROW && FLUSHES_HALVES;

  Acc result1[PIECES][TILES], result2[KEYS ? PIECES : 1][TILES];
  int first[TILES], count[TILES];  // rows that a column sees
  float lse[TILES];                // dq: of the columns
  Splat less_delta[TILES];         // dq: what g starts from, -delta of the columns
  float factor;                    // dk, dv of float16: of ds
  float scale;                     // of the scores, times log2 e
  int wave_column;                 // the wave's first

  GPU_FN void start_columns(int column0) {
    wave_column = column0 + WAVE_COLUMNS * S::place();
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int i = 0; i < PIECES; i++) {
        result1[i][n] = Acc(0.f);
        if (KEYS) result2[i][n] = Acc(0.f);
      }
  }
  GPU_FN void hide(Acc (&s)[TILES], int row0) const {
    const int lane = int(fresh_lane()), mine = int(u32(lane) / 16);
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      // A key is first seen by the query that stands at it.
      const int first_row = KEYS ? wave_column + 16 * n + (lane & 15) : first[n];
      const int from = row0 + (GPU_RDNA3 ? mine : ELEMENTS * mine) - first_row;
#pragma unroll
      for (int e = 0; e < ELEMENTS; e++)
        s[n][e] = u32(from + (GPU_RDNA3 ? 2 * e : e)) < u32(count[n]) ? s[n][e] : HIDDEN;
    }
  }
  // Scores -> probabilities. `of_row`: dk, dv: lse of the 16 rows.
  GPU_FN void probabilities(Acc (&s)[TILES], const Acc& of_row) const {
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const Acc power = __builtin_elementwise_fma(s[n], Acc(scale), KEYS ? of_row : Acc(-lse[n]));
#pragma unroll
      for (int e = 0; e < ELEMENTS; e++) s[n][e] = exp2_fast(power[e]);
    }
  }
  // g - delta -> ds.
  GPU_FN void score_gradients(Acc (&g)[TILES], const Acc (&p)[TILES]) const {
#pragma unroll
    for (int n = 0; n < TILES; n++) g[n] *= NARROW && KEYS ? p[n] * factor : p[n];
  }
  GPU_FN static void round(Piece (&to)[TILES], const Acc (&x)[TILES]) {
#pragma unroll
    for (int n = 0; n < TILES; n++) to[n] = piece_of<T>(x[n]);
  }

  // Columns of a result, times `factor` of each, to rows of [columns, heads, D] from `to` on. V: in which order its
  // pieces have the head width.
  template <class V, class Out>
  GPU_FN static void store_in_order(const Acc (&x)[PIECES][TILES], const float (&factor)[TILES], Out* to, int column0,
                                    int columns, long stride) {
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const int c = column0 + WAVE_COLUMNS * S::place() + 16 * n + column();
      if (c >= columns) continue;
#pragma unroll
      for (int part = 0; part < V::PARTS; part++)
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) {
          float out[V::WIDE];
#pragma unroll
          for (int j = 0; j < V::WIDE; j++) out[j] = x[part * V::WIDE + j][n][e] * factor[n];
          Out* place = to + c * stride + S::first_element() + V::first(part, row(e));
          if constexpr (sizeof(Out) == 4) Pairs<T>::store_floats(place, out);
          else Pairs<T>::store(place, out);
        }
    }
  }
};

}  // namespace attention
