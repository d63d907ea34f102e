// dq[t] = scale sum_j ds[t, j] k[j],  ds = p (dp - delta),  p = exp(scale q . k - lse),  dp[t, j] = do[t] . v[j],
// delta[t] = do[t] . o[t], over the keys j that query t sees (attention.wgsl, with q_start = 0 and S = T).
//
//   do q [B, T, H, D], k v [B, T, G, D] float32 or float16; starts [B, T] i32
//   stats [B, H, T] vec2 f32: lse log2(e), delta (attention_delta.wgsl)
//   dq [B, T, H, D] (DQ_T), overwritten; with splits > 1 f32 [splits, B, T, H, D], for attention_reduce.wgsl.
//
// Dispatch: splits * H * B * ceil(T / BM) workgroups (folded), the tiles with the most keys first. Layout of tiles and
// registers as in attention.wgsl; scores and dp are made again chunk by chunk of D, then k is read as rows.
//
// Dao, FlashAttention-2 (arXiv:2307.08691), algorithm 2, dq split off so that no atomics are needed.
struct Params {
  batch: u32, queries: u32, heads: u32, kv_heads: u32,
  query_tiles: u32, splits: u32, window: u32, scale: f32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> dy: array<DO_T>;
@group(0) @binding(2) var<storage, read> q: array<Q_T>;
@group(0) @binding(3) var<storage, read> k: array<K_T>;
@group(0) @binding(4) var<storage, read> v: array<V_T>;
@group(0) @binding(5) var<storage, read> stats: array<vec2<f32>>;
@group(0) @binding(6) var<storage, read> starts: array<i32>;
@group(0) @binding(7) var<storage, read_write> dq: array<DQ_T>;

const THREADS: u32 = TX * TY;
const LOG2E: f32 = 1.4426950408889634;

struct ScoreRow { at: array<array<vec4<f32>, VN4>, NV>, pad: vec4<f32> }
var<workgroup> q_tile: array<array<array<vec4<f32>, DC4_PADDED>, TY>, RM>;
var<workgroup> dy_tile: array<array<array<vec4<f32>, DC4_PADDED>, TY>, RM>;
var<workgroup> k_tile: array<array<array<vec4<f32>, DC4_PADDED>, TX>, RN>;  // key 4 (tx + TX g) + e at [4 g + e][tx]
var<workgroup> v_tile: array<array<array<vec4<f32>, DC4_PADDED>, TX>, RN>;
var<workgroup> flat_tile: array<array<array<vec4<f32>, TX>, RD>, VN>;
var<workgroup> p_tile: array<array<ScoreRow, TY>, RM>;

// Columns 4c .. 4c + 3 of a row of D elements, zero beyond D.
fn load_q(row: u32, c: u32) -> vec4<f32> {
#if VEC
  if (c >= W4) { return vec4<f32>(0.0); }
  return vec4<f32>(q[row * W4 + c]);
#else
  var x = vec4<f32>(0.0);
  for (var e = 0u; e < 4u; e++) { if (4u * c + e < WIDTH) { x[e] = f32(q[row * WIDTH + 4u * c + e]); } }
  return x;
#endif
}

fn load_dy(row: u32, c: u32) -> vec4<f32> {
#if VEC
  if (c >= W4) { return vec4<f32>(0.0); }
  return vec4<f32>(dy[row * W4 + c]);
#else
  var x = vec4<f32>(0.0);
  for (var e = 0u; e < 4u; e++) { if (4u * c + e < WIDTH) { x[e] = f32(dy[row * WIDTH + 4u * c + e]); } }
  return x;
#endif
}

fn load_k(row: u32, c: u32) -> vec4<f32> {
#if VEC
  if (c >= W4) { return vec4<f32>(0.0); }
  return vec4<f32>(k[row * W4 + c]);
#else
  var x = vec4<f32>(0.0);
  for (var e = 0u; e < 4u; e++) { if (4u * c + e < WIDTH) { x[e] = f32(k[row * WIDTH + 4u * c + e]); } }
  return x;
#endif
}

fn load_v(row: u32, c: u32) -> vec4<f32> {
#if VEC
  if (c >= W4) { return vec4<f32>(0.0); }
  return vec4<f32>(v[row * W4 + c]);
#else
  var x = vec4<f32>(0.0);
  for (var e = 0u; e < 4u; e++) { if (4u * c + e < WIDTH) { x[e] = f32(v[row * WIDTH + 4u * c + e]); } }
  return x;
#endif
}

fn store_dq(row: u32, c: u32, x: vec4<f32>) {
#if VEC
  if (c < W4) { dq[row * W4 + c] = DQ_T(x); }
#else
  for (var e = 0u; e < 4u; e++) { if (4u * c + e < WIDTH) { dq[row * WIDTH + 4u * c + e] = DQ_T(x[e]); } }
#endif
}

// Chunk `chunk` (4 DC4 columns) of BM queries or BN keys from `first` on, of one head.
fn fill_q(chunk: u32, b: u32, head: u32, first: u32, lid: u32) {
#unroll n LOADS_ROWS
  {
    let at = lid + $nu * THREADS;
    if (at < BM * DC4) {
      let row = at / DC4;
      var x = vec4<f32>(0.0);
      if (first + row < p.queries) { x = load_q((b * p.queries + first + row) * p.heads + head, chunk * DC4 + at % DC4); }
      q_tile[row / TY][row % TY][at % DC4] = x;
    }
  }
#end
}

fn fill_dy(chunk: u32, b: u32, head: u32, first: u32, lid: u32) {
#unroll n LOADS_ROWS
  {
    let at = lid + $nu * THREADS;
    if (at < BM * DC4) {
      let row = at / DC4;
      var x = vec4<f32>(0.0);
      if (first + row < p.queries) { x = load_dy((b * p.queries + first + row) * p.heads + head, chunk * DC4 + at % DC4); }
      dy_tile[row / TY][row % TY][at % DC4] = x;
    }
  }
#end
}

fn fill_k(chunk: u32, b: u32, head: u32, first: u32, lid: u32) {
#unroll n LOADS_COLUMNS
  {
    let at = lid + $nu * THREADS;
    if (at < BN * DC4) {
      let row = at / DC4;
      var x = vec4<f32>(0.0);
      if (first + row < p.queries) { x = load_k((b * p.queries + first + row) * p.kv_heads + head, chunk * DC4 + at % DC4); }
      k_tile[row / (4u * TX) * 4u + row % 4u][row / 4u % TX][at % DC4] = x;
    }
  }
#end
}

fn fill_v(chunk: u32, b: u32, head: u32, first: u32, lid: u32) {
#unroll n LOADS_COLUMNS
  {
    let at = lid + $nu * THREADS;
    if (at < BN * DC4) {
      let row = at / DC4;
      var x = vec4<f32>(0.0);
      if (first + row < p.queries) { x = load_v((b * p.queries + first + row) * p.kv_heads + head, chunk * DC4 + at % DC4); }
      v_tile[row / (4u * TX) * 4u + row % 4u][row / 4u % TX][at % DC4] = x;
    }
  }
#end
}

// VN whole rows.
fn fill_k_rows(b: u32, head: u32, first: u32, lid: u32) {
#unroll n LOADS_FLAT
  {
    let at = lid + $nu * THREADS;
    if (at < VN * RD * TX) {
      let row = at / (RD * TX);
      let c = at % (RD * TX);
      var x = vec4<f32>(0.0);
      if (first + row < p.queries) { x = load_k((b * p.queries + first + row) * p.kv_heads + head, c); }
      flat_tile[row][c / TX][c % TX] = x;
    }
  }
#end
}

@compute @workgroup_size(TX * TY)
fn main(
  @builtin(workgroup_id) wg: vec3<u32>,
  @builtin(num_workgroups) nwg: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
) {
  var id = wg.x + wg.y * nwg.x;
  if (id >= p.splits * p.heads * p.batch * p.query_tiles) { return; }
  let split = id % p.splits;
  id /= p.splits;
  let h = id % p.heads;
  id /= p.heads;
  let b = id % p.batch;
  let t0 = (p.query_tiles - 1u - id / p.batch) * BM;
  let kv_head = h / (p.heads / p.kv_heads);
  let tx = lid % TX;
  let ty = lid / TX;

  // Keys that the tile sees: both bounds rise with t.
  let t_last = min(t0 + BM, p.queries) - 1u;
  var first_key = u32(starts[b * p.queries + t0]);
  var last_low = u32(starts[b * p.queries + t_last]);
  if (p.window > 0u) {
    first_key = max(first_key, t0 + 1u - min(p.window, t0 + 1u));
    last_low = max(last_low, t_last + 1u - min(p.window, t_last + 1u));
  }

  var low: array<u32, RM>;
  var stat: array<vec2<f32>, RM>;
  var acc: array<vec4<f32>, ACC>;
#unroll i RM
  {
    let t = min(t0 + $iu * TY + ty, p.queries - 1u);
    low[$i] = u32(starts[b * p.queries + t]);
    if (p.window > 0u) { low[$i] = max(low[$i], t + 1u - min(p.window, t + 1u)); }
    stat[$i] = stats[(b * p.heads + h) * p.queries + t];
  }
#end
#unroll n ACC
  acc[$n] = vec4<f32>(0.0);
#end

  for (var tile = first_key / BN + split; tile * BN <= t_last; tile += p.splits) {
    let j0 = tile * BN;
    var s: array<vec4<f32>, SCORES>;
    var dp: array<vec4<f32>, SCORES>;
#unroll n SCORES
    s[$n] = vec4<f32>(0.0);
    dp[$n] = vec4<f32>(0.0);
#end
    for (var chunk = 0u; chunk < ND; chunk++) {
      workgroupBarrier();
      fill_q(chunk, b, h, t0, lid);
      fill_dy(chunk, b, h, t0, lid);
      fill_k(chunk, b, kv_head, j0, lid);
      fill_v(chunk, b, kv_head, j0, lid);
      workgroupBarrier();
#unroll c DC4
#unroll g RN4
      {
        let b0 = k_tile[4u * $gu][tx][$c];
        let b1 = k_tile[4u * $gu + 1u][tx][$c];
        let b2 = k_tile[4u * $gu + 2u][tx][$c];
        let b3 = k_tile[4u * $gu + 3u][tx][$c];
        let bx = vec4<f32>(b0.x, b1.x, b2.x, b3.x);
        let by = vec4<f32>(b0.y, b1.y, b2.y, b3.y);
        let bz = vec4<f32>(b0.z, b1.z, b2.z, b3.z);
        let bw = vec4<f32>(b0.w, b1.w, b2.w, b3.w);
#unroll i RM
        {
          let a = q_tile[$i][ty][$c];
          s[$iu * RN4 + $gu] = fma(vec4<f32>(a.w), bw, fma(vec4<f32>(a.z), bz,
            fma(vec4<f32>(a.y), by, fma(vec4<f32>(a.x), bx, s[$iu * RN4 + $gu]))));
        }
#end
      }
      {
        let b0 = v_tile[4u * $gu][tx][$c];
        let b1 = v_tile[4u * $gu + 1u][tx][$c];
        let b2 = v_tile[4u * $gu + 2u][tx][$c];
        let b3 = v_tile[4u * $gu + 3u][tx][$c];
        let bx = vec4<f32>(b0.x, b1.x, b2.x, b3.x);
        let by = vec4<f32>(b0.y, b1.y, b2.y, b3.y);
        let bz = vec4<f32>(b0.z, b1.z, b2.z, b3.z);
        let bw = vec4<f32>(b0.w, b1.w, b2.w, b3.w);
#unroll i RM
        {
          let a = dy_tile[$i][ty][$c];
          dp[$iu * RN4 + $gu] = fma(vec4<f32>(a.w), bw, fma(vec4<f32>(a.z), bz,
            fma(vec4<f32>(a.y), by, fma(vec4<f32>(a.x), bx, dp[$iu * RN4 + $gu]))));
        }
#end
      }
#end
#end
    }

    let masked = j0 + BN > t0 + 1u || j0 < last_low;
#unroll i RM
#unroll g RN4
    {
      let x = exp2(fma(s[$iu * RN4 + $gu], vec4<f32>(p.scale * LOG2E), vec4<f32>(-stat[$i].x)));
      var ds = x * (dp[$iu * RN4 + $gu] - vec4<f32>(stat[$i].y));
      if (masked) {
        let key = vec4<u32>(j0 + 4u * (tx + TX * $gu)) + vec4<u32>(0u, 1u, 2u, 3u);
        ds = select(vec4<f32>(0.0), ds, (key >= vec4<u32>(low[$i])) & (key <= vec4<u32>(t0 + $iu * TY + ty)));
      }
      p_tile[$i][ty].at[(tx + TX * $gu) / VN4][(tx + TX * $gu) % VN4] = ds;
    }
#end
#end

    for (var part = 0u; part < NV; part++) {
      if (part > 0u) { workgroupBarrier(); }
      fill_k_rows(b, kv_head, j0 + part * VN, lid);
      workgroupBarrier();
#unroll n VN4
#unroll r RD
      {
        let b0 = flat_tile[4u * $nu][$r][tx];
        let b1 = flat_tile[4u * $nu + 1u][$r][tx];
        let b2 = flat_tile[4u * $nu + 2u][$r][tx];
        let b3 = flat_tile[4u * $nu + 3u][$r][tx];
#unroll i RM
        {
          let a = p_tile[$i][ty].at[part][$n];
          acc[$iu * RD + $ru] = fma(vec4<f32>(a.w), b3, fma(vec4<f32>(a.z), b2,
            fma(vec4<f32>(a.y), b1, fma(vec4<f32>(a.x), b0, acc[$iu * RD + $ru]))));
        }
#end
      }
#end
#end
    }
  }

#unroll i RM
  {
    let t = t0 + $iu * TY + ty;
    if (t < p.queries) {
#unroll r RD
      store_dq(((split * p.batch + b) * p.queries + t) * p.heads + h, tx + TX * $ru, acc[$iu * RD + $ru] * p.scale);
#end
    }
  }
#end
}
