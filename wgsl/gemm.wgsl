// C = alpha * op(A) op(B) (+ U op(V)) + bias + residual (+ C), tiled, f32 accumulation.
//
//   a [M, K], or [K, M] where TRANS_A (row stride lda, first column a_col)   f32 or f16 (A_KIND)
//   b [K, N], or [N, K] where TRANS_B          f32, f16, bf16 (B_KIND), or NF4 codes of a [out, in] weight:
//                                              [N, K] where TRANS_B (forward), else [K, N] (dx)
//   c [M, N] (row stride ldc, first column c_col)   f32 or f16 (C_KIND); with SPLIT f32 partial sums [splits, M, N]
//   bias [N] f32, residual [M, N] f32 or f16 (R_KIND)
//   u [M, rank] f32, v [N, rank] where TRANS_B, else [rank, N], f32: the LoRA term, read as a few more steps of K
//   NF4: absmax f32 by block, or u8 codes in u32s with nested_absmax, nested_code[256], nested_offset[1]
//
// Dispatch: x = tiles of N, y = tiles of M, z = batch, or splits of K where SPLIT (then gemm_reduce.wgsl adds the partial
// sums and does the epilogue).
// A workgroup owns a TILE_M x TILE_N tile of C. Its threads form a grid of TILE_M / (4 TM4) by TILE_N / (4 TN4); each owns
// TM4 x TN4 blocks of 4 x 4, the blocks half a tile apart so that a warp reads and writes whole lines. Tiles of A and B
// stand in workgroup memory k-major; the next tile is fetched into registers while this one is multiplied.
// Kinds: 0 f32, 1 f16, 2 bf16, 3 NF4. f16 and bf16 are read as u32 pairs, so reading needs no device feature.
// VEC_x: the row length of that operand is a multiple of 4, and 4 elements are read at a time.
// Source: the register-tiled product of V. Volkov and J. Demmel, "Benchmarking GPUs to tune dense linear algebra", 2008.

#include "gemm_bindings.wgsl"

#if A_KIND == 0
#if VEC_A
@group(0) @binding(1) var<storage, read> a: array<vec4<f32>>;
#else
@group(0) @binding(1) var<storage, read> a: array<f32>;
#endif
#else
#if VEC_A
@group(0) @binding(1) var<storage, read> a: array<vec2<u32>>;
#else
@group(0) @binding(1) var<storage, read> a: array<u32>;
#endif
#endif
#if B_KIND == 0
#if VEC_B
@group(0) @binding(2) var<storage, read> b: array<vec4<f32>>;
#else
@group(0) @binding(2) var<storage, read> b: array<f32>;
#endif
#else
#if B_KIND == 3
@group(0) @binding(2) var<storage, read> b: array<u32>;
#else
#if VEC_B
@group(0) @binding(2) var<storage, read> b: array<vec2<u32>>;
#else
@group(0) @binding(2) var<storage, read> b: array<u32>;
#endif
#endif
#endif
const M4: u32 = TILE_M / 4u;
const N4: u32 = TILE_N / 4u;
const TX: u32 = N4 / TN4;  // threads along N
const TY: u32 = M4 / TM4;  // threads along M
const THREADS: u32 = TX * TY;

#if !DIRECT
var<workgroup> a_tile: array<array<vec4<f32>, M4>, TILE_K>;
var<workgroup> b_tile: array<array<vec4<f32>, N4>, TILE_K>;
#endif
#if B_KIND == 3
var<workgroup> level: array<f32, 16>;

#include "nf4_levels.wgsl"

fn block_absmax(block: u32) -> f32 {
#if NESTED
  let q = (absmax[block >> 2u] >> (8u * (block & 3u))) & 255u;
  // Not a fused multiply-add: see nf4_dequantize.wgsl.
  return bitcast<f32>(bitcast<u32>(nested_code[q] * nested_absmax[block / p.nested_block]) | p.zero) + nested_offset[0];
#else
  return absmax[block];
#endif
}

// Element e of 8 codes: two a byte, the first in the high nibble.
fn decode(codes: u32, e: u32) -> f32 { return level[(codes >> ((e >> 1u) * 8u + 4u - (e & 1u) * 4u)) & 15u]; }
#include "nf4_rounding.wgsl"
fn decode4(codes: u32, first: u32, scale: f32) -> vec4<f32> {
  return rounded(scale * vec4<f32>(decode(codes, first), decode(codes, first + 1u), decode(codes, first + 2u), decode(codes, first + 3u)));
}
#endif

fn bf16_pair(w: u32) -> vec2<f32> { return vec2<f32>(bitcast<f32>(w << 16u), bitcast<f32>(w & 0xffff0000u)); }

// Four consecutive elements of A from `at`; with VEC_A `at` is a multiple of 4 and all four are inside the row.
fn read_a(at: u32, inside: u32) -> vec4<f32> {
#if VEC_A
#if A_KIND == 0
  return a[at >> 2u];
#else
  let w = a[at >> 2u];
  return vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y));
#endif
#else
  var r = vec4<f32>(0.0);
#unroll e 4
#if A_KIND == 0
  if ($eu < inside) { r[$e] = a[at + $eu]; }
#else
  if ($eu < inside) { let i = at + $eu; r[$e] = unpack2x16float(a[i >> 1u])[i & 1u]; }
#endif
#end
  return r;
#endif
}

#if B_KIND != 3
fn read_b(at: u32, inside: u32) -> vec4<f32> {
#if VEC_B
#if B_KIND == 0
  return b[at >> 2u];
#else
  let w = b[at >> 2u];
#if B_KIND == 1
  return vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y));
#else
  return vec4<f32>(bf16_pair(w.x), bf16_pair(w.y));
#endif
#endif
#else
  var r = vec4<f32>(0.0);
#unroll e 4
#if B_KIND == 0
  if ($eu < inside) { r[$e] = b[at + $eu]; }
#else
#if B_KIND == 1
  if ($eu < inside) { let i = at + $eu; r[$e] = unpack2x16float(b[i >> 1u])[i & 1u]; }
#else
  if ($eu < inside) { let i = at + $eu; r[$e] = bf16_pair(b[i >> 1u])[i & 1u]; }
#endif
#endif
#end
  return r;
#endif
}
#endif

#if DIRECT
// Without workgroup memory: each invocation reads its rows of A and columns of B straight from their arrays, four steps of
// K at a time, and owns 4 TM4 consecutive rows and 4 TN4 consecutive columns. For devices whose barriers cost more than
// cached reads (a software driver runs a barrier as a switch between invocations).
@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let row0 = wg.y * TILE_M + (lid / TX) * (4u * TM4);
  let col0 = wg.x * TILE_N + (lid % TX) * (4u * TN4);
  if (row0 >= p.m || col0 >= p.n) { return; }
  let a_base = wg.z * p.m * p.k;
  let b_base = wg.z * p.k * p.n;
  let c_base = wg.z * p.m * p.ldc;
  let last_row = p.m - 1u;
  let last_col = p.n - 1u;
#unroll i TM4
#unroll r 4
#unroll j TN4
  var acc_$i_$r_$j = vec4<f32>(0.0);
#end
#end
#end
  for (var k = 0u; k < p.k; k += 4u) {
#if TRANS_A
#unroll s 4
#unroll i TM4
    var at_$s_$i = vec4<f32>(0.0);
    if (k + $su < p.k && row0 + 4u * $iu < p.m) {
      at_$s_$i = read_a(a_base + (k + $su) * p.lda + p.a_col + row0 + 4u * $iu, p.m - row0 - 4u * $iu);
    }
#end
#end
#unroll i TM4
#unroll r 4
    let a_$i_$r = vec4<f32>(at_0_$i[$r], at_1_$i[$r], at_2_$i[$r], at_3_$i[$r]);
#end
#end
#else
#unroll i TM4
#unroll r 4
    let a_$i_$r = read_a(a_base + min(row0 + 4u * $iu + $ru, last_row) * p.lda + p.a_col + k, p.k - k);
#end
#end
#endif
#if TRANS_B
#unroll j TN4
#unroll e 4
    let bt_$j_$e = read_b(b_base + min(col0 + 4u * $ju + $eu, last_col) * p.k + k, p.k - k);
#end
#end
#unroll s 4
#unroll j TN4
    let b_$s_$j = vec4<f32>(bt_$j_0[$s], bt_$j_1[$s], bt_$j_2[$s], bt_$j_3[$s]);
#end
#end
#else
#unroll s 4
#unroll j TN4
    var b_$s_$j = vec4<f32>(0.0);
    if (k + $su < p.k && col0 + 4u * $ju < p.n) {
      b_$s_$j = read_b(b_base + (k + $su) * p.n + col0 + 4u * $ju, p.n - col0 - 4u * $ju);
    }
#end
#end
#endif
#unroll i TM4
#unroll r 4
#unroll j TN4
#unroll s 4
    acc_$i_$r_$j = fma(vec4<f32>(a_$i_$r[$s]), b_$s_$j, acc_$i_$r_$j);
#end
#end
#end
#end
  }
#if HAS_LOWRANK
  for (var s = 0u; s < p.rank; s++) {
#unroll j TN4
#if TRANS_B
    let at_$j = (p.c_col + col0 + 4u * $ju) * p.rank + s;
    let top_$j = (p.c_col + last_col) * p.rank + s;
    let v_$j = vec4<f32>(v[min(at_$j, top_$j)], v[min(at_$j + p.rank, top_$j)],
                         v[min(at_$j + 2u * p.rank, top_$j)], v[min(at_$j + 3u * p.rank, top_$j)]);
#else
    let at_$j = s * p.n + col0 + 4u * $ju;
    let top_$j = s * p.n + last_col;
    let v_$j = vec4<f32>(v[min(at_$j, top_$j)], v[min(at_$j + 1u, top_$j)], v[min(at_$j + 2u, top_$j)], v[min(at_$j + 3u, top_$j)]);
#endif
#end
#unroll i TM4
#unroll r 4
    let u_$i_$r = u[min(row0 + 4u * $iu + $ru, last_row) * p.rank + s] / p.alpha;
#unroll j TN4
    acc_$i_$r_$j = fma(vec4<f32>(u_$i_$r), v_$j, acc_$i_$r_$j);
#end
#end
#end
  }
#endif
#unroll i TM4
#unroll r 4
  if (row0 + 4u * $iu + $ru < p.m) {
#unroll j TN4
    store(row0 + 4u * $iu + $ru, col0 + 4u * $ju, c_base, acc_$i_$r_$j);
#end
  }
#end
#end
}
#else
@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let tx = lid % TX;
  let ty = lid / TX;
  let m0 = wg.y * TILE_M;
  let n0 = wg.x * TILE_N;
#if SPLIT
  let k_first = wg.z * p.k_per_split;
  let k_last = min(p.k, k_first + p.k_per_split);
  let a_base = 0u;
  let b_base = 0u;
  let c_base = wg.z * p.m * p.n;
#else
  let k_first = 0u;
  let k_last = p.k;
  let a_base = wg.z * p.m * p.k;
  let b_base = wg.z * p.k * p.n;
  let c_base = wg.z * p.m * p.ldc;
#endif

#if B_KIND == 3
  for (var i = lid; i < 16u; i += THREADS) { level[i] = nf4_level(i); }
#endif

  var acc: array<array<vec4<f32>, TN4>, ACC_ROWS>;
#unroll i ACC_ROWS
#unroll j TN4
  acc[$i][$j] = vec4<f32>(0.0);
#end
#end

  var next_a: array<vec4<f32>, LOADS_A>;
#if B_KIND == 3
  var next_b: array<u32, LOADS_B>;
  var next_scale: array<f32, LOADS_B>;
#else
  var next_b: array<vec4<f32>, LOADS_B>;
#endif

  // One step before the first tile, to fetch it; then multiply tile t while tile t + 1 is fetched.
  let tiles = (k_last - k_first + TILE_K - 1u) / TILE_K;
#if HAS_LOWRANK
  let steps = select(tiles, tiles + (p.rank + TILE_K - 1u) / TILE_K, !SPLIT || wg.z == 0u);
#else
  let steps = tiles;
#endif
  for (var t = 0u; t <= steps; t++) {
    if (t > tiles) {
#if HAS_LOWRANK
      workgroupBarrier();
      load_lowrank((t - tiles - 1u) * TILE_K, m0, n0, lid);
      workgroupBarrier();
#endif
    } else if (t > 0u) {
      workgroupBarrier();
#unroll i LOADS_A
      {
        let at = lid + $iu * THREADS;
#if TRANS_A
        if (at < TILE_K * M4) { a_tile[at / M4][at % M4] = next_a[$i]; }
#else
        if (at < TILE_M * (TILE_K / 4u)) {
          let row = at / (TILE_K / 4u);
          let kq = (at % (TILE_K / 4u)) * 4u;
          a_tile[kq][row >> 2u][row & 3u] = next_a[$i].x;
          a_tile[kq + 1u][row >> 2u][row & 3u] = next_a[$i].y;
          a_tile[kq + 2u][row >> 2u][row & 3u] = next_a[$i].z;
          a_tile[kq + 3u][row >> 2u][row & 3u] = next_a[$i].w;
        }
#endif
      }
#end
#unroll i LOADS_B
      {
        let at = lid + $iu * THREADS;
#if B_KIND == 3
#if TRANS_B
        if (at < TILE_N * (TILE_K / 8u)) {
          let col = at / (TILE_K / 8u);
          let ko = (at % (TILE_K / 8u)) * 8u;
#unroll e 8
          b_tile[ko + $eu][col >> 2u][col & 3u] = rounded(vec4<f32>(next_scale[$i] * decode(next_b[$i], $eu))).x;
#end
        }
#else
        if (at < TILE_K * (N4 / 2u)) {
          let row = at / (N4 / 2u);
          let co = (at % (N4 / 2u)) * 2u;
          b_tile[row][co] = decode4(next_b[$i], 0u, next_scale[$i]);
          b_tile[row][co + 1u] = decode4(next_b[$i], 4u, next_scale[$i]);
        }
#endif
#else
#if TRANS_B
        if (at < TILE_N * (TILE_K / 4u)) {
          let col = at / (TILE_K / 4u);
          let kq = (at % (TILE_K / 4u)) * 4u;
          b_tile[kq][col >> 2u][col & 3u] = next_b[$i].x;
          b_tile[kq + 1u][col >> 2u][col & 3u] = next_b[$i].y;
          b_tile[kq + 2u][col >> 2u][col & 3u] = next_b[$i].z;
          b_tile[kq + 3u][col >> 2u][col & 3u] = next_b[$i].w;
        }
#else
        if (at < TILE_K * N4) { b_tile[at / N4][at % N4] = next_b[$i]; }
#endif
#endif
      }
#end
      workgroupBarrier();
    }
    if (t < tiles) {
      let k0 = k_first + t * TILE_K;
      // Rows and columns beyond the edge repeat the last one: they are never stored. Beyond k_last there must be zeros.
#unroll i LOADS_A
      {
        let at = lid + $iu * THREADS;
#if TRANS_A
        let row = k0 + at / M4;
        let col = m0 + (at % M4) * 4u;
        next_a[$i] = vec4<f32>(0.0);
        if (row < k_last && col < p.m) { next_a[$i] = read_a(a_base + row * p.lda + p.a_col + col, p.m - col); }
#else
        let row = min(m0 + at / (TILE_K / 4u), p.m - 1u);
        let col = k0 + (at % (TILE_K / 4u)) * 4u;
        next_a[$i] = vec4<f32>(0.0);
        if (col < k_last) { next_a[$i] = read_a(a_base + row * p.lda + p.a_col + col, k_last - col); }
#endif
      }
#end
#unroll i LOADS_B
      {
        let at = lid + $iu * THREADS;
#if B_KIND == 3
        next_b[$i] = 0u;
        next_scale[$i] = 0.0;
#if TRANS_B
        let row = min(n0 + at / (TILE_K / 8u), p.n - 1u);
        let col = k0 + (at % (TILE_K / 8u)) * 8u;
        let element = row * p.k + col;
        if (col < k_last) {
#else
        let row = k0 + at / (N4 / 2u);
        let col = n0 + (at % (N4 / 2u)) * 8u;
        let element = row * p.n + col;
        if (row < k_last && col < p.n) {
#endif
          next_b[$i] = b[element >> 3u];
          next_scale[$i] = block_absmax(element / p.block_size);
        }
#else
        next_b[$i] = vec4<f32>(0.0);
#if TRANS_B
        let row = min(n0 + at / (TILE_K / 4u), p.n - 1u);
        let col = k0 + (at % (TILE_K / 4u)) * 4u;
        if (col < k_last) { next_b[$i] = read_b(b_base + row * p.k + col, k_last - col); }
#else
        let row = k0 + at / N4;
        let col = n0 + (at % N4) * 4u;
        if (row < k_last && col < p.n) { next_b[$i] = read_b(b_base + row * p.n + col, p.n - col); }
#endif
#endif
      }
#end
    }
    if (t > 0u) {
#unroll k TILE_K
      {
#unroll i TM4
        let a$i = a_tile[$k][ty + $iu * TY];
#end
#unroll j TN4
        let b$j = b_tile[$k][tx + $ju * TX];
#end
#unroll i TM4
#unroll r 4
#unroll j TN4
        acc[$i * 4 + $r][$j] = fma(vec4<f32>(a$i[$r]), b$j, acc[$i * 4 + $r][$j]);
#end
#end
#end
      }
#end
    }
  }

#unroll i TM4
#unroll r 4
  {
    let row = m0 + (ty + $iu * TY) * 4u + $ru;
    if (row < p.m) {
#unroll j TN4
      {
        let col = n0 + (tx + $ju * TX) * 4u;
        store(row, col, c_base, acc[$i * 4 + $r][$j]);
      }
#end
    }
  }
#end
#end
}

#if HAS_LOWRANK
// One tile of the LoRA term, ranks s0 to s0 + TILE_K. alpha scales the sum at the end, so it is taken out here.
fn load_lowrank(s0: u32, m0: u32, n0: u32, lid: u32) {
  for (var at = lid; at < TILE_M * TILE_K; at += THREADS) {
    let row = at / TILE_K;
    let s = at % TILE_K;
    var x = 0.0;
    if (s0 + s < p.rank) { x = u[min(m0 + row, p.m - 1u) * p.rank + s0 + s] / p.alpha; }
    a_tile[s][row >> 2u][row & 3u] = x;
  }
  for (var at = lid; at < TILE_N * TILE_K; at += THREADS) {
#if TRANS_B
    let col = at / TILE_K;
    let s = at % TILE_K;
    let source = (p.c_col + min(n0 + col, p.n - 1u)) * p.rank + s0 + s;
#else
    let col = at % TILE_N;
    let s = at / TILE_N;
    let source = (s0 + s) * p.n + min(n0 + col, p.n - 1u);
#endif
    var x = 0.0;
    if (s0 + s < p.rank) { x = v[source]; }
    b_tile[s][col >> 2u][col & 3u] = x;
  }
}
#endif

#endif

#include "gemm_store.wgsl"
