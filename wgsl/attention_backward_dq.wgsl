// dq[t] = scale sum_j ds[t, j] k[j],  ds = p (dp - delta),  p = exp(scale q . k - lse),  dp[t, j] = do[t] . v[j],
// delta[t] = do[t] . o[t], over the keys j that query t sees (attention.wgsl, with cache_len = 0 and S = T).
//
//   do q [B, T, H, D], k v [B, T, G, D] float32 or float16; doc_start [B, T] i32
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
@group(0) @binding(6) var<storage, read> doc_start: array<i32>;
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
#if VEC
fn load_q(row: u32, c: u32) -> vec4<f32> {
  if (c < W4) { return vec4<f32>(q[row * W4 + c]); }
  return vec4<f32>(0.0);
}
fn load_dy(row: u32, c: u32) -> vec4<f32> {
  if (c < W4) { return vec4<f32>(dy[row * W4 + c]); }
  return vec4<f32>(0.0);
}
fn load_k(row: u32, c: u32) -> vec4<f32> {
  if (c < W4) { return vec4<f32>(k[row * W4 + c]); }
  return vec4<f32>(0.0);
}
fn load_v(row: u32, c: u32) -> vec4<f32> {
  if (c < W4) { return vec4<f32>(v[row * W4 + c]); }
  return vec4<f32>(0.0);
}
fn store_dq(row: u32, c: u32, y: vec4<f32>) { if (c < W4) { dq[row * W4 + c] = DQ_T(y); } }
#else
fn load_q(row: u32, c: u32) -> vec4<f32> {
  var x = vec4<f32>(0.0);
  for (var e = 0u; e < min(4u, WIDTH - min(4u * c, WIDTH)); e++) { x[e] = f32(q[row * WIDTH + 4u * c + e]); }
  return x;
}
fn load_dy(row: u32, c: u32) -> vec4<f32> {
  var x = vec4<f32>(0.0);
  for (var e = 0u; e < min(4u, WIDTH - min(4u * c, WIDTH)); e++) { x[e] = f32(dy[row * WIDTH + 4u * c + e]); }
  return x;
}
fn load_k(row: u32, c: u32) -> vec4<f32> {
  var x = vec4<f32>(0.0);
  for (var e = 0u; e < min(4u, WIDTH - min(4u * c, WIDTH)); e++) { x[e] = f32(k[row * WIDTH + 4u * c + e]); }
  return x;
}
fn load_v(row: u32, c: u32) -> vec4<f32> {
  var x = vec4<f32>(0.0);
  for (var e = 0u; e < min(4u, WIDTH - min(4u * c, WIDTH)); e++) { x[e] = f32(v[row * WIDTH + 4u * c + e]); }
  return x;
}
fn store_dq(row: u32, c: u32, y: vec4<f32>) {
  for (var e = 0u; e < min(4u, WIDTH - min(4u * c, WIDTH)); e++) { dq[row * WIDTH + 4u * c + e] = DQ_T(y[e]); }
}
#endif

// Chunk `chunk` (4 DC4 columns) of the rows from `first` on, of one head: this invocation's share on its way to the
// tiles.
struct Queries { q: array<vec4<f32>, LOADS_ROWS>, dy: array<vec4<f32>, LOADS_ROWS> }
struct Keys { k: array<vec4<f32>, LOADS_COLUMNS>, v: array<vec4<f32>, LOADS_COLUMNS> }

fn fetch_queries(chunk: u32, b: u32, head: u32, first: u32, lid: u32) -> Queries {
  var x: Queries;
#unroll n LOADS_ROWS
  {
    let at = lid + $nu * THREADS;
    let t = first + at / DC4;
    let row = (b * p.queries + t) * p.heads + head;
    x.q[$n] = vec4<f32>(0.0);
    x.dy[$n] = vec4<f32>(0.0);
    if (at < BM * DC4 && t < p.queries) {
      x.q[$n] = load_q(row, chunk * DC4 + at % DC4);
      x.dy[$n] = load_dy(row, chunk * DC4 + at % DC4);
    }
  }
#end
  return x;
}

fn fetch_keys(chunk: u32, b: u32, head: u32, first: u32, lid: u32) -> Keys {
  var x: Keys;
#unroll n LOADS_COLUMNS
  {
    let at = lid + $nu * THREADS;
    let t = first + at / DC4;
    let row = (b * p.queries + t) * p.kv_heads + head;
    x.k[$n] = vec4<f32>(0.0);
    x.v[$n] = vec4<f32>(0.0);
    if (at < BN * DC4 && t < p.queries) {
      x.k[$n] = load_k(row, chunk * DC4 + at % DC4);
      x.v[$n] = load_v(row, chunk * DC4 + at % DC4);
    }
  }
#end
  return x;
}

fn put_chunk(queries: Queries, keys: Keys, lid: u32) {
#unroll n LOADS_ROWS
  {
    let at = lid + $nu * THREADS;
    let row = at / DC4;
    if (at < BM * DC4) {
      q_tile[row / TY][row % TY][at % DC4] = queries.q[$n];
      dy_tile[row / TY][row % TY][at % DC4] = queries.dy[$n];
    }
  }
#end
#unroll n LOADS_COLUMNS
  {
    let at = lid + $nu * THREADS;
    let row = at / DC4;
    if (at < BN * DC4) {
      k_tile[row / (4u * TX) * 4u + row % 4u][row / 4u % TX][at % DC4] = keys.k[$n];
      v_tile[row / (4u * TX) * 4u + row % 4u][row / 4u % TX][at % DC4] = keys.v[$n];
    }
  }
#end
}

// VN whole rows.
fn fetch_k_rows(b: u32, head: u32, first: u32, lid: u32) -> array<vec4<f32>, LOADS_FLAT> {
  var x: array<vec4<f32>, LOADS_FLAT>;
#unroll n LOADS_FLAT
  {
    let at = lid + $nu * THREADS;
    let row = at / (RD * TX);
    let c = at % (RD * TX);
    x[$n] = vec4<f32>(0.0);
    if (at < VN * RD * TX && first + row < p.queries) {
      x[$n] = load_k((b * p.queries + first + row) * p.kv_heads + head, c);
    }
  }
#end
  return x;
}

fn put_k_rows(x: array<vec4<f32>, LOADS_FLAT>, lid: u32) {
#unroll n LOADS_FLAT
  {
    let at = lid + $nu * THREADS;
    let row = at / (RD * TX);
    let c = at % (RD * TX);
    if (at < VN * RD * TX) { flat_tile[row][c / TX][c % TX] = x[$n]; }
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
  var first_key = u32(doc_start[b * p.queries + t0]);
  var last_low = u32(doc_start[b * p.queries + t_last]);
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
    low[$i] = u32(doc_start[b * p.queries + t]);
    if (p.window > 0u) { low[$i] = max(low[$i], t + 1u - min(p.window, t + 1u)); }
    stat[$i] = stats[(b * p.heads + h) * p.queries + t];
  }
#end
#unroll n ACC
  acc[$n] = vec4<f32>(0.0);
#end

#if PREFETCH
  var next_queries = fetch_queries(0u, b, h, t0, lid);
  var next_keys = fetch_keys(0u, b, kv_head, (first_key / BN + split) * BN, lid);
  var next_rows: array<vec4<f32>, LOADS_FLAT>;
#endif
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
#if PREFETCH
      put_chunk(next_queries, next_keys, lid);
      workgroupBarrier();
      if (chunk + 1u < ND) {
        next_keys = fetch_keys(chunk + 1u, b, kv_head, j0, lid);
        next_queries = fetch_queries(chunk + 1u, b, h, t0, lid);
      } else {
        next_rows = fetch_k_rows(b, kv_head, j0, lid);
      }
#else
      put_chunk(fetch_queries(chunk, b, h, t0, lid), fetch_keys(chunk, b, kv_head, j0, lid), lid);
      workgroupBarrier();
#endif
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
#if PREFETCH
      put_k_rows(next_rows, lid);
      workgroupBarrier();
      if (part + 1u < NV) {
        next_rows = fetch_k_rows(b, kv_head, j0 + (part + 1u) * VN, lid);
      } else {
        next_keys = fetch_keys(0u, b, kv_head, j0 + p.splits * BN, lid);
        next_queries = fetch_queries(0u, b, h, t0, lid);
      }
#else
      put_k_rows(fetch_k_rows(b, kv_head, j0 + part * VN, lid), lid);
      workgroupBarrier();
#endif
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
