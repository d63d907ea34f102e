// dv[j] = sum_t p[t, j] do[t],  dk[j] = scale sum_t ds[t, j] q[t], over the queries t that see key j, of all heads of
// the group; p, ds and delta as in attention_backward_dq.wgsl.
//
//   do q [B, T, H, D], k v [B, T, G, D] float32 or float16; doc_start [B, T] i32
//   stats [B, H, T] vec2 f32: lse log2(e), delta (attention_delta.wgsl)
//   dk dv [B, T, G, D] (DK_T, DV_T), overwritten; with head_splits * query_splits > 1
//   f32 [head_splits * query_splits, B, T, G, D], for attention_reduce.wgsl.
//
// Dispatch: head_splits * query_splits * G * B * ceil(T / BM) workgroups (folded), the tiles with the most queries
// first. A workgroup owns BM keys of one key/value head and walks the heads of its part of the group and the tiles of
// BN queries that see them. Everything is transposed against attention_backward_dq.wgsl: rows are keys, columns
// queries. p and then ds go through the same p_tile.
//
// Dao, FlashAttention-2 (arXiv:2307.08691), algorithm 2.
struct Params {
  batch: u32, queries: u32, heads: u32, kv_heads: u32,
  key_tiles: u32, head_splits: u32, query_splits: u32, window: u32,
  scale: f32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> dy: array<DO_T>;
@group(0) @binding(2) var<storage, read> q: array<Q_T>;
@group(0) @binding(3) var<storage, read> k: array<K_T>;
@group(0) @binding(4) var<storage, read> v: array<V_T>;
@group(0) @binding(5) var<storage, read> stats: array<vec2<f32>>;
@group(0) @binding(6) var<storage, read> doc_start: array<i32>;
@group(0) @binding(7) var<storage, read_write> dk: array<DK_T>;
@group(0) @binding(8) var<storage, read_write> dv: array<DV_T>;

const THREADS: u32 = TX * TY;
const LOG2E: f32 = 1.4426950408889634;
const NEVER: u32 = 0xffffffffu;

struct ScoreRow { at: array<array<vec4<f32>, VN4>, NV>, pad: vec4<f32> }
var<workgroup> k_tile: array<array<array<vec4<f32>, DC4_PADDED>, TY>, RM>;
var<workgroup> v_tile: array<array<array<vec4<f32>, DC4_PADDED>, TY>, RM>;
var<workgroup> q_tile: array<array<array<vec4<f32>, DC4_PADDED>, TX>, RN>;  // query 4 (tx + TX g) + e at [4 g + e][tx]
var<workgroup> dy_tile: array<array<array<vec4<f32>, DC4_PADDED>, TX>, RN>;
var<workgroup> flat_tile: array<array<array<vec4<f32>, TX>, RD>, VN>;
var<workgroup> p_tile: array<array<ScoreRow, TY>, RM>;
// Of the queries 4c .. 4c + 3 of a tile: first key seen, lse log2(e), delta.
var<workgroup> low_tile: array<vec4<u32>, BN4>;
var<workgroup> lse_tile: array<vec4<f32>, BN4>;
var<workgroup> delta_tile: array<vec4<f32>, BN4>;

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
fn store_dk(row: u32, c: u32, y: vec4<f32>) { if (c < W4) { dk[row * W4 + c] = DK_T(y); } }
fn store_dv(row: u32, c: u32, y: vec4<f32>) { if (c < W4) { dv[row * W4 + c] = DV_T(y); } }
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
fn store_dk(row: u32, c: u32, y: vec4<f32>) {
  for (var e = 0u; e < min(4u, WIDTH - min(4u * c, WIDTH)); e++) { dk[row * WIDTH + 4u * c + e] = DK_T(y[e]); }
}
fn store_dv(row: u32, c: u32, y: vec4<f32>) {
  for (var e = 0u; e < min(4u, WIDTH - min(4u * c, WIDTH)); e++) { dv[row * WIDTH + 4u * c + e] = DV_T(y[e]); }
}
#endif

// Chunk `chunk` (4 DC4 columns) of the rows from `first` on, of one head: this invocation's share on its way to the
// tiles.
struct Keys { k: array<vec4<f32>, LOADS_ROWS>, v: array<vec4<f32>, LOADS_ROWS> }
struct Queries { q: array<vec4<f32>, LOADS_COLUMNS>, dy: array<vec4<f32>, LOADS_COLUMNS> }

fn fetch_keys(chunk: u32, b: u32, head: u32, first: u32, lid: u32) -> Keys {
  var x: Keys;
#unroll n LOADS_ROWS
  {
    let at = lid + $nu * THREADS;
    let t = first + at / DC4;
    let row = (b * p.queries + t) * p.kv_heads + head;
    x.k[$n] = vec4<f32>(0.0);
    x.v[$n] = vec4<f32>(0.0);
    if (at < BM * DC4 && t < p.queries) {
      x.k[$n] = load_k(row, chunk * DC4 + at % DC4);
      x.v[$n] = load_v(row, chunk * DC4 + at % DC4);
    }
  }
#end
  return x;
}

fn fetch_queries(chunk: u32, b: u32, head: u32, first: u32, lid: u32) -> Queries {
  var x: Queries;
#unroll n LOADS_COLUMNS
  {
    let at = lid + $nu * THREADS;
    let t = first + at / DC4;
    let row = (b * p.queries + t) * p.heads + head;
    x.q[$n] = vec4<f32>(0.0);
    x.dy[$n] = vec4<f32>(0.0);
    if (at < BN * DC4 && t < p.queries) {
      x.q[$n] = load_q(row, chunk * DC4 + at % DC4);
      x.dy[$n] = load_dy(row, chunk * DC4 + at % DC4);
    }
  }
#end
  return x;
}

fn put_chunk(keys: Keys, queries: Queries, lid: u32) {
#unroll n LOADS_ROWS
  {
    let at = lid + $nu * THREADS;
    let row = at / DC4;
    if (at < BM * DC4) {
      k_tile[row / TY][row % TY][at % DC4] = keys.k[$n];
      v_tile[row / TY][row % TY][at % DC4] = keys.v[$n];
    }
  }
#end
#unroll n LOADS_COLUMNS
  {
    let at = lid + $nu * THREADS;
    let row = at / DC4;
    if (at < BN * DC4) {
      q_tile[row / (4u * TX) * 4u + row % 4u][row / 4u % TX][at % DC4] = queries.q[$n];
      dy_tile[row / (4u * TX) * 4u + row % 4u][row / 4u % TX][at % DC4] = queries.dy[$n];
    }
  }
#end
}

// VN whole rows.
fn fetch_dy_rows(b: u32, head: u32, first: u32, lid: u32) -> array<vec4<f32>, LOADS_FLAT> {
  var x: array<vec4<f32>, LOADS_FLAT>;
#unroll n LOADS_FLAT
  {
    let at = lid + $nu * THREADS;
    let row = at / (RD * TX);
    let c = at % (RD * TX);
    x[$n] = vec4<f32>(0.0);
    if (at < VN * RD * TX && first + row < p.queries) {
      x[$n] = load_dy((b * p.queries + first + row) * p.heads + head, c);
    }
  }
#end
  return x;
}

fn put_rows(x: array<vec4<f32>, LOADS_FLAT>, lid: u32) {
#unroll n LOADS_FLAT
  {
    let at = lid + $nu * THREADS;
    let row = at / (RD * TX);
    let c = at % (RD * TX);
    if (at < VN * RD * TX) { flat_tile[row][c / TX][c % TX] = x[$n]; }
  }
#end
}

fn fetch_q_rows(b: u32, head: u32, first: u32, lid: u32) -> array<vec4<f32>, LOADS_FLAT> {
  var x: array<vec4<f32>, LOADS_FLAT>;
#unroll n LOADS_FLAT
  {
    let at = lid + $nu * THREADS;
    let row = at / (RD * TX);
    let c = at % (RD * TX);
    x[$n] = vec4<f32>(0.0);
    if (at < VN * RD * TX && first + row < p.queries) {
      x[$n] = load_q((b * p.queries + first + row) * p.heads + head, c);
    }
  }
#end
  return x;
}

fn fill_stats(b: u32, h: u32, t0: u32, lid: u32) {
  for (var c = lid; c < BN4; c += THREADS) {
    var low = vec4<u32>(NEVER);
    var lse = vec4<f32>(0.0);
    var delta = vec4<f32>(0.0);
    for (var e = 0u; e < 4u; e++) {
      let t = t0 + 4u * c + e;
      if (t < p.queries) {
        low[e] = u32(doc_start[b * p.queries + t]);
        if (p.window > 0u) { low[e] = max(low[e], t + 1u - min(p.window, t + 1u)); }
        let stat = stats[(b * p.heads + h) * p.queries + t];
        lse[e] = stat.x;
        delta[e] = stat.y;
      }
    }
    low_tile[c] = low;
    lse_tile[c] = lse;
    delta_tile[c] = delta;
  }
}

@compute @workgroup_size(TX * TY)
fn main(
  @builtin(workgroup_id) wg: vec3<u32>,
  @builtin(num_workgroups) nwg: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
) {
  var id = wg.x + wg.y * nwg.x;
  let parts = p.head_splits * p.query_splits;
  if (id >= parts * p.kv_heads * p.batch * p.key_tiles) { return; }
  let split = id % parts;
  id /= parts;
  let kv_head = id % p.kv_heads;
  id /= p.kv_heads;
  let b = id % p.batch;
  let j0 = (id / p.batch) * BM;
  let j_last = min(j0 + BM, p.queries) - 1u;
  let tx = lid % TX;
  let ty = lid / TX;
  let query_split = split % p.query_splits;
  let group = p.heads / p.kv_heads / p.head_splits;  // heads of this part
  let first_head = kv_head * (p.heads / p.kv_heads) + split / p.query_splits * group;
  var end_query = p.queries;
  if (p.window > 0u) { end_query = min(end_query, j_last + p.window); }

  var acc_k: array<vec4<f32>, ACC>;
  var acc_v: array<vec4<f32>, ACC>;
#unroll n ACC
  acc_k[$n] = vec4<f32>(0.0);
  acc_v[$n] = vec4<f32>(0.0);
#end

  for (var h = first_head; h < first_head + group; h++) {
    for (var tile = j0 / BN + query_split; tile * BN < end_query; tile += p.query_splits) {
      let t0 = tile * BN;
      // Documents rise within a row: when the first query is beyond this tile's keys, so are all others.
      if (u32(doc_start[b * p.queries + t0]) > j_last) { break; }
      var s: array<vec4<f32>, SCORES>;
      var dp: array<vec4<f32>, SCORES>;
#unroll n SCORES
      s[$n] = vec4<f32>(0.0);
      dp[$n] = vec4<f32>(0.0);
#end
#if PREFETCH
      var next_keys = fetch_keys(0u, b, kv_head, j0, lid);
      var next_queries = fetch_queries(0u, b, h, t0, lid);
      var next_rows: array<vec4<f32>, LOADS_FLAT>;
#endif
      for (var chunk = 0u; chunk < ND; chunk++) {
        workgroupBarrier();
        if (chunk == 0u) { fill_stats(b, h, t0, lid); }
#if PREFETCH
        put_chunk(next_keys, next_queries, lid);
        workgroupBarrier();
        if (chunk + 1u < ND) {
          next_keys = fetch_keys(chunk + 1u, b, kv_head, j0, lid);
          next_queries = fetch_queries(chunk + 1u, b, h, t0, lid);
        } else {
          next_rows = fetch_dy_rows(b, h, t0, lid);
        }
#else
        put_chunk(fetch_keys(chunk, b, kv_head, j0, lid), fetch_queries(chunk, b, h, t0, lid), lid);
        workgroupBarrier();
#endif
#unroll c DC4
#unroll g RN4
      {
        let b0 = q_tile[4u * $gu][tx][$c];
        let b1 = q_tile[4u * $gu + 1u][tx][$c];
        let b2 = q_tile[4u * $gu + 2u][tx][$c];
        let b3 = q_tile[4u * $gu + 3u][tx][$c];
        let bx = vec4<f32>(b0.x, b1.x, b2.x, b3.x);
        let by = vec4<f32>(b0.y, b1.y, b2.y, b3.y);
        let bz = vec4<f32>(b0.z, b1.z, b2.z, b3.z);
        let bw = vec4<f32>(b0.w, b1.w, b2.w, b3.w);
#unroll i RM
        {
          let a = k_tile[$i][ty][$c];
          s[$iu * RN4 + $gu] = fma(vec4<f32>(a.w), bw, fma(vec4<f32>(a.z), bz,
            fma(vec4<f32>(a.y), by, fma(vec4<f32>(a.x), bx, s[$iu * RN4 + $gu]))));
        }
#end
      }
      {
        let b0 = dy_tile[4u * $gu][tx][$c];
        let b1 = dy_tile[4u * $gu + 1u][tx][$c];
        let b2 = dy_tile[4u * $gu + 2u][tx][$c];
        let b3 = dy_tile[4u * $gu + 3u][tx][$c];
        let bx = vec4<f32>(b0.x, b1.x, b2.x, b3.x);
        let by = vec4<f32>(b0.y, b1.y, b2.y, b3.y);
        let bz = vec4<f32>(b0.z, b1.z, b2.z, b3.z);
        let bw = vec4<f32>(b0.w, b1.w, b2.w, b3.w);
#unroll i RM
        {
          let a = v_tile[$i][ty][$c];
          dp[$iu * RN4 + $gu] = fma(vec4<f32>(a.w), bw, fma(vec4<f32>(a.z), bz,
            fma(vec4<f32>(a.y), by, fma(vec4<f32>(a.x), bx, dp[$iu * RN4 + $gu]))));
        }
#end
      }
#end
#end
      }

      // s becomes p; p to workgroup memory for dv. dp becomes ds.
#unroll g RN4
      {
        let c = tx + TX * $gu;
        let lse = lse_tile[c];
        let delta = delta_tile[c];
        let low = low_tile[c];
        let t = vec4<u32>(t0 + 4u * c) + vec4<u32>(0u, 1u, 2u, 3u);
#unroll i RM
        {
          let key = vec4<u32>(j0 + $iu * TY + ty);
          let x = select(
            vec4<f32>(0.0),
            exp2(fma(s[$iu * RN4 + $gu], vec4<f32>(p.scale * LOG2E), -lse)),
            (key >= low) & (key <= t),
          );
          dp[$iu * RN4 + $gu] = x * (dp[$iu * RN4 + $gu] - delta);
          p_tile[$i][ty].at[c / VN4][c % VN4] = x;
        }
#end
      }
#end
      for (var part = 0u; part < NV; part++) {
        if (part > 0u) { workgroupBarrier(); }
#if PREFETCH
        put_rows(next_rows, lid);
        workgroupBarrier();
        if (part + 1u < NV) {
          next_rows = fetch_dy_rows(b, h, t0 + (part + 1u) * VN, lid);
        } else {
          next_rows = fetch_q_rows(b, h, t0, lid);
        }
#else
        put_rows(fetch_dy_rows(b, h, t0 + part * VN, lid), lid);
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
          acc_v[$iu * RD + $ru] = fma(vec4<f32>(a.w), b3, fma(vec4<f32>(a.z), b2,
            fma(vec4<f32>(a.y), b1, fma(vec4<f32>(a.x), b0, acc_v[$iu * RD + $ru]))));
        }
#end
      }
#end
#end
      }
      workgroupBarrier();
#unroll i RM
#unroll g RN4
      p_tile[$i][ty].at[(tx + TX * $gu) / VN4][(tx + TX * $gu) % VN4] = dp[$iu * RN4 + $gu];
#end
#end
      for (var part = 0u; part < NV; part++) {
        if (part > 0u) { workgroupBarrier(); }
#if PREFETCH
        put_rows(next_rows, lid);
        workgroupBarrier();
        if (part + 1u < NV) { next_rows = fetch_q_rows(b, h, t0 + (part + 1u) * VN, lid); }
#else
        put_rows(fetch_q_rows(b, h, t0 + part * VN, lid), lid);
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
          acc_k[$iu * RD + $ru] = fma(vec4<f32>(a.w), b3, fma(vec4<f32>(a.z), b2,
            fma(vec4<f32>(a.y), b1, fma(vec4<f32>(a.x), b0, acc_k[$iu * RD + $ru]))));
        }
#end
      }
#end
#end
      }
    }
  }

#unroll i RM
  {
    let j = j0 + $iu * TY + ty;
    if (j < p.queries) {
#unroll r RD
      {
        let row = ((split * p.batch + b) * p.queries + j) * p.kv_heads + kv_head;
        store_dk(row, tx + TX * $ru, acc_k[$iu * RD + $ru] * p.scale);
        store_dv(row, tx + TX * $ru, acc_v[$iu * RD + $ru]);
      }
#end
    }
  }
#end
}
