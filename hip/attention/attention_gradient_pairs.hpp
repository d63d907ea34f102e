// The loop of attention's gradient on RDNA, heads of 256: two neighboring waves have the same columns, and a half of
// the width each. attention_gradient.hpp defines the names. Each wave has partial sums of s and of g, which
// it gives to the other through LDS, both at once; then both compute p and ds from the same bits.
//
//     dq        tile t + 1 is stored at the end of tile t: y1 and y2 along over tile t, which all waves have read, and
//               y1 across over tile t - 1
//     dk, dv    y1 and y2 along and across take turns in one buffer: each is stored when all have read the other
#pragma once
#include "attention_gradient_rdna.hpp"
#include "attention_pairs.hpp"

namespace attention {

template <class T, bool KEYS>
struct Gradient<T, 256, KEYS> : GradientProducts<T, 256, KEYS> {
  using Base = GradientProducts<T, 256, KEYS>;
  using typename Base::Own;
  using Base::ROWS, Base::TILES, Base::READS, Base::OF, Base::TURNS, Base::lds, Base::wave;
  using Base::fetch, Base::put_along, Base::put_across;
  // LDS behind the rows: what waves hand over, a tile of scores and one of their gradients.
  static constexpr int HANDED = Base::END / 16, SLOTS = HANDED + 2 * WAVES * HANDED_TILE;

  GPU_FN u32x4* handed(int of, int which) const { return lds + HANDED + (which * WAVES + of) * HANDED_TILE; }
  // This wave's parts of s and g, handed over.
  GPU_FN void parts(Acc (&s)[1][TILES], Acc (&g)[1][TILES], const Own& own) {
    this->template scores<0>(s, own, [] {});
    this->template scores<1>(g, own, [] {});
    hand_over(handed(wave, 0), s[0][0]), hand_over(handed(wave, 1), g[0][0]);
  }
  // Up to p and ds.
  GPU_FN void both(Piece (&p)[1][TILES], Piece (&ds)[1][TILES], Acc (&s)[1][TILES], Acc (&g)[1][TILES], const Walk& w,
                   bool partly) {
    const Acc of_row = KEYS ? this->stats(w, 0, 0) : Acc(0.f);
    add_handed(s[0][0], handed(wave ^ 1, 0)), add_handed(g[0][0], handed(wave ^ 1, 1));
    g[0][0] += KEYS ? this->stats(w, 1, 0) : Acc(this->less_delta[0]);
    if (partly) this->hide(s[0], w.row);
    this->second_operands(p[0], ds[0], s[0], g[0], of_row);
    gpu::sched_fence();
  }
  // From rows `all` of heads [head, last_head].
  GPU_FN void run(const Source& from, const Span& all, const Span& mine, int head, int last_head) {
    const int begin = all.begin / ROWS * ROWS;
    Walk w{begin, head, begin, all.end, last_head, 0};
    fetch(from, w);
    put_along(from, w);
    if (!TURNS) put_across(w);
    gpu::lds_barrier();
#pragma unroll 1
    while (!w.over()) {
      Walk next = w;
      next.template step<ROWS>();
      const Own own = this->own_rows(w);
      const bool touched = mine.touches(w.row, ROWS);
      Acc s[1][TILES], g[1][TILES];
      Piece p[1][TILES], ds[1][TILES];
      if (touched) this->first_operands(own), parts(s, g, own);
      meet();  // all have read y along
      if (TURNS) put_across(w);
      gpu::sched_fence();
      fetch(from, next);
      gpu::sched_fence();
      if (touched) both(p, ds, s, g, w, !mine.whole(w.row, ROWS));
      if (TURNS) {
        meet();  // y across is there
#pragma unroll
        for (int n = 0; n < READS; n++) this->read(own, 2 * OF + n);
      }
      if (touched) this->add_to_results(own, p, ds);
      if (TURNS) meet();  // all have read it
      else put_across(next);
      put_along(from, next);
      meet();  // tile t is read, tile t + 1 is there
      w = next;
    }
  }
};

}  // namespace attention
