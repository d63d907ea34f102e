// o[t] = sum_j p[t, j] v[j],  p[t, j] = exp(scale q[t] . k[j] - lse[t]),  lse[t] = log sum_j exp(scale q[t] . k[j])
// over the keys j that query t sees: max(doc_start[b, t], i - window + 1) <= j <= i, i = cache_len + t.
//
//   q [B, T, H, D], k v [B, S, G, D] float32 or float16; doc_start [B, T] i32; cache_len [1] i32
//   o [B, T, H, D] (O_T), lse [B, H, T] f32; with splits > 1: o f32 [splits, B, T, H, D], lse [splits, B, H, T],
//   each normalized on its own, for attention_combine.wgsl.
//
// Dispatch: splits * H * B * ceil(T / BM) workgroups (folded), the tiles with the most keys first. A workgroup of TX x
// TY invocations owns BM queries of one head and walks the key tiles of BN that they see (of every `splits`-th).
// Invocation (tx, ty) holds rows ty + TY i (i < RM); of the scores the columns 4 (tx + TX g) + e, of the output the
// columns 4 (tx + TX r) + e. Scores pass through workgroup memory (p_tile) to become the left operand of the second
// matmul. The row maximum is reduced after each tile; the row sum only at the end, because all parts are scaled alike.
//
// SOFTCAP > 0 caps the scores: SOFTCAP tanh(scale q . k / SOFTCAP).
//
// Dao, FlashAttention-2 (arXiv:2307.08691), algorithm 1; the exponent in base 2.
#include "attention.inc.wgsl" forward
#include "attention.inc.wgsl" tiles
#include "attention.inc.wgsl" fetch_rows x=v tokens=keys heads=kv_heads

struct QueryRow { at: array<array<vec4<f32>, DC4>, Q_CHUNKS>, pad: vec4<f32> }
var<workgroup> q_tile: array<array<QueryRow, TY>, RM>;
var<workgroup> k_tile: array<array<array<vec4<f32>, DC4_PADDED>, TX>, RN>;  // key 4 (tx + TX g) + e at [4 g + e][tx]
var<workgroup> reduce_tile: array<array<array<vec4<f32>, TY>, TX>, RM4>;
var<workgroup> low_tile: array<u32, BM>;

// Chunk `chunk` (4 DC4 columns) of the query tile that starts at query t0 of (b, h), into place `place`.
fn fetch_q(chunk: u32, b: u32, h: u32, t0: u32, lid: u32) -> array<vec4<f32>, LOADS_ROWS> {
  var x: array<vec4<f32>, LOADS_ROWS>;
#unroll n LOADS_ROWS
  {
    let at = lid + $nu * THREADS;
    let row = at / DC4;
    x[$n] = vec4<f32>(0.0);
    if (at < BM * DC4 && t0 + row < p.queries) {
      x[$n] = load_q((b * p.queries + t0 + row) * p.heads + h, chunk * DC4 + at % DC4) * (p.scale * LOG2E);
    }
  }
#end
  return x;
}

fn put_q(x: array<vec4<f32>, LOADS_ROWS>, place: u32, lid: u32) {
#unroll n LOADS_ROWS
  {
    let at = lid + $nu * THREADS;
    let row = at / DC4;
    if (at < BM * DC4) { q_tile[row / TY][row % TY].at[place][at % DC4] = x[$n]; }
  }
#end
}

// Keys from `end` on are not read, for the reason given in attention.inc.wgsl (fetch_rows).
fn fetch_k(chunk: u32, b: u32, kv_head: u32, j0: u32, end: u32, lid: u32) -> array<vec4<f32>, LOADS_COLUMNS> {
  var x: array<vec4<f32>, LOADS_COLUMNS>;
#unroll n LOADS_COLUMNS
  {
    let at = lid + $nu * THREADS;
    let row = at / DC4;
    x[$n] = vec4<f32>(0.0);
    if (at < BN * DC4 && j0 + row < end) {
      x[$n] = load_k((b * p.keys + j0 + row) * p.kv_heads + kv_head, chunk * DC4 + at % DC4);
    }
  }
#end
  return x;
}

fn put_k(x: array<vec4<f32>, LOADS_COLUMNS>, lid: u32) {
#unroll n LOADS_COLUMNS
  {
    let at = lid + $nu * THREADS;
    let row = at / DC4;
    if (at < BN * DC4) { k_tile[row / (4u * TX) * 4u + row % 4u][row / 4u % TX][at % DC4] = x[$n]; }
  }
#end
}

@compute @workgroup_size(TX * TY)
fn main(
  @builtin(workgroup_id) wg: vec3<u32>,
  @builtin(num_workgroups) nwg: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
) {
#include "attention.inc.wgsl" query_tile

  // First key of each query, and the range of keys that the tile sees. Both bounds rise with t.
  let first_position = u32(cache_len[0]) + t0;
  for (var row = lid; row < BM; row += THREADS) {
    let t = min(t0 + row, p.queries - 1u);
    low_tile[row] = first_seen(doc_start[b * p.queries + t], u32(cache_len[0]) + t);
  }
  let last_position = u32(cache_len[0]) + min(t0 + BM, p.queries) - 1u;
  let end_key = min(last_position + 1u, p.keys);
  let first_key = first_seen(doc_start[b * p.queries + t0], first_position);
#if Q_RESIDENT
#unroll c ND
  put_q(fetch_q($cu, b, h, t0, lid), $cu, lid);
#end
#endif
  workgroupBarrier();
  let last_low = low_tile[min(t0 + BM, p.queries) - 1u - t0];

  var acc: array<vec4<f32>, ACC>;
  var row_max: array<f32, RM>;
  var row_sum: array<f32, RM>;
#unroll n ACC
  acc[$n] = vec4<f32>(0.0);
#end
#unroll i RM
  row_max[$i] = FLOOR;
  row_sum[$i] = 0.0;
#end

  for (var tile = first_key / BN + split; tile * BN < end_key; tile += p.splits) {
    let j0 = tile * BN;
    var s: array<vec4<f32>, SCORES>;
#unroll n SCORES
    s[$n] = vec4<f32>(0.0);
#end
    for (var chunk = 0u; chunk < ND; chunk++) {
      workgroupBarrier();
      put_k(fetch_k(chunk, b, kv_head, j0, end_key, lid), lid);
#if !Q_RESIDENT
      put_q(fetch_q(chunk, b, h, t0, lid), 0u, lid);
#endif
      workgroupBarrier();
#if Q_RESIDENT
      let place = chunk;
#else
      let place = 0u;
#endif
#unroll c DC4
#unroll g RN4
#include "attention.inc.wgsl" dot sum=s left=q_tile[$i][ty].at[place] right=k_tile
#end
#end
    }

#if SOFTCAP
#unroll n SCORES
    s[$n] = capped(s[$n]);
#end
#endif
    // Mask only tiles in which some query may not see some key.
    if (j0 + BN > first_position + 1u || j0 + BN > p.keys || j0 < last_low) {
#unroll i RM
      {
        let low = low_tile[$iu * TY + ty];
        let high = min(first_position + $iu * TY + ty, p.keys - 1u);
#unroll g RN4
        {
          let key = vec4<u32>(j0 + 4u * (tx + TX * $gu)) + vec4<u32>(0u, 1u, 2u, 3u);
          let seen = (key >= vec4<u32>(low)) & (key <= vec4<u32>(high));
          s[$iu * RN4 + $gu] = select(vec4<f32>(MASKED), s[$iu * RN4 + $gu], seen);
        }
#end
      }
#end
    }

    // The row maximum: within each invocation, then over the TX invocations of the row.
    var high: array<vec4<f32>, RM4>;
#unroll i RM4
#unroll e 4
    {
      var m = s[($iu * 4u + $eu) * RN4];
#unroll g RN4
      m = max(m, s[($iu * 4u + $eu) * RN4 + $gu]);
#end
      high[$i][$e] = max(max(m.x, m.y), max(m.z, m.w));
    }
#end
    reduce_tile[$i][tx][ty] = high[$i];
#end
    workgroupBarrier();
#unroll i RM4
#unroll x TX
    high[$i] = max(high[$i], reduce_tile[$i][$x][ty]);
#end
#end
#unroll i RM
    {
      let m = max(row_max[$i], high[$iu / 4u][$iu % 4u]);
      let shrink = exp2(row_max[$i] - m);
      row_max[$i] = m;
      var total = vec4<f32>(0.0);
#unroll g RN4
      {
        let x = exp2(s[$iu * RN4 + $gu] - vec4<f32>(m));
        total += x;
        p_tile[$i][ty].at[(tx + TX * $gu) / VN4][(tx + TX * $gu) % VN4] = x;
      }
#end
      row_sum[$i] = row_sum[$i] * shrink + (total.x + total.y + total.z + total.w);
#unroll r RD
      acc[$iu * RD + $ru] *= shrink;
#end
    }
#end

    for (var part = 0u; part < NV; part++) {
      if (part > 0u) { workgroupBarrier(); }
      put_rows(fetch_v_rows(b, kv_head, j0 + part * VN, end_key, lid), lid);
      workgroupBarrier();
#include "attention.inc.wgsl" accumulate sum=acc
    }
  }

  // The row sum, in one order for all invocations.
  workgroupBarrier();
#unroll i RM4
  reduce_tile[$i][tx][ty] =
    vec4<f32>(row_sum[$iu * 4u], row_sum[$iu * 4u + 1u], row_sum[$iu * 4u + 2u], row_sum[$iu * 4u + 3u]);
#end
  workgroupBarrier();
  var sums: array<vec4<f32>, RM4>;
#unroll i RM4
  sums[$i] = vec4<f32>(0.0);
#unroll x TX
  sums[$i] += reduce_tile[$i][$x][ty];
#end
#end
#unroll i RM
  {
    let t = t0 + $iu * TY + ty;
    let total = sums[$iu / 4u][$iu % 4u];
    if (t < p.queries) {
      let row = ((split * p.batch + b) * p.queries + t) * p.heads + h;
      let inverse = select(0.0, 1.0 / total, total > 0.0);
#unroll r RD
      store_o(row, tx + TX * $ru, acc[$iu * RD + $ru] * inverse);
#end
      if (tx == 0u) {
        lse[((split * p.batch + b) * p.heads + h) * p.queries + t] = LN2 * (row_max[$i] + log2(max(total, 1e-30)));
      }
    }
  }
#end
}
