// Parts of the GEMM kernels.

#part bindings
// Part of the GEMM kernels: parameters, and all arrays except the two operands.
struct Params {
  m: u32, n: u32, k: u32, k_per_split: u32,
  ldc: u32, c_col: u32, rank: u32, block_shift: u32,
  nested_shift: u32, lda: u32, a_col: u32, zero: u32, alpha: f32,
  part_1: u32, part_2: u32, absmax_1: u32, absmax_2: u32, nested_1: u32, nested_2: u32,
  ld_u: u32, column_1: u32, column_2: u32, first_x: u32, first_y: u32,  // first_x, first_y: workgroups of earlier dispatches
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(3) var<storage, read_write> c: array<C_T>;
#if HAS_BIAS
@group(0) @binding(4) var<storage, read> bias: array<f32>;
#endif
#if HAS_RESIDUAL
#if RESIDUAL_AHEAD
// Never written, but with a read-only binding NVIDIA's compiler moves its loads past barriers, to their use.
@group(0) @binding(5) var<storage, read_write> residual: array<R_T>;
#else
@group(0) @binding(5) var<storage, read> residual: array<R_T>;
#endif
#endif
#if HAS_LOWRANK
@group(0) @binding(6) var<storage, read> u: array<U_T>;
@group(0) @binding(7) var<storage, read> v: array<V_T>;
// The weight of a stack that a column of C belongs to. Rows of u have the ranks of all weights, one after the other;
// rows of v have those of their own weight. The bounds are multiples of 64 columns.
fn part_of(column: u32) -> u32 {
#if PARTS
  return u32(p.c_col + column >= p.column_1) + u32(p.c_col + column >= p.column_2);
#else
  return 0u;
#endif
}
#endif

#include "common.inc.wgsl" optimization_barrier
fn first_element() -> u32 { return 0u; }
#endpart

#part dense x binding kind vec
// Part of gemm.wgsl and gemm_direct.wgsl: the operand $x of f32, f16 or bf16, in units of 4 elements of a row, with the
// interface of a weight format (nf4.inc.wgsl).
#include "common.inc.wgsl" dense x=$x binding=$binding kind=$kind vec=$vec
alias Ready_$x = vec4<f32>;

// With $vec, `at` is a multiple of 4 and all four elements are inside the row.
fn fetch_$x(at: u32, inside: u32) -> vec4<f32> {
#if $vec
  return read_$x(at >> 2u);
#else
  var r = vec4<f32>(0.0);
#unroll e 4
  if ($eu < inside) { r[$e] = read_$x(at + $eu); }
#end
  return r;
#endif
}

fn ready_$x(unit: vec4<f32>) -> vec4<f32> { return unit; }
fn four_$x(unit: vec4<f32>, first: u32) -> vec4<f32> { return unit; }
fn prepare_$x(lid: u32) {}
#endpart

#part extra_rows share
// Part of gemm_matrix.wgsl: an expert's last EXTRA$share blocks of 16 rows, below a full tile that they are multiplied with.
// All subgroups multiply such a block, each EXTRA_J x 16 of its columns. Sums, and places of the invocation's loads.
  let extra_first = subgroup * (16u * EXTRA_J);  // columns of the extra rows
#unroll r EXTRA$share
#unroll j EXTRA_J
  var extra_acc_$r_$j = coop_mat16x16<f32, C>();
#end
#end
#unroll i LOADS_EXTRA$share
  let extra_place_$i = place_of(lid + (LOADS_A$share + $iu) * THREADS, A_COLS / 8u, 1u);
  let extra_row_$i = extra_place_$i.x;
  let extra_col_$i = extra_place_$i.y * 8u;
#end
#endpart

#part fetch_extra share
// Part of the part fetch of gemm_matrix.wgsl: the same for the extra rows.
#unroll i LOADS_EXTRA$share
  let extra_from_$i = a_base + row_of_a(min(m0 + extra_row_$i, m_end - 1u)) * p.lda + p.a_col + inside_k(k0 + extra_col_$i, 8u);
  let next_extra_$i = fetch_a(extra_from_$i, 8u);
#end
#endpart

#part stage_extra from share
// Part of the part stage of gemm_matrix.wgsl: the same for the extra rows, which may be fewer than loads.
#unroll i LOADS_EXTRA$share
  if (extra_row_$i < A_ROWS) {
    let unit = ready_a($from_extra_$i);
    let inside = !K_EDGE || k0 + extra_col_$i < k_last;
    let to = extra_row_$i * A_LD + extra_col_$i / 8u;
    a_tile[to] = Eight(select(vec4<f16>(), four_a(unit, 0u), inside), select(vec4<f16>(), four_a(unit, 4u), inside));
  }
#end
#endpart

#part multiply_extra share
// Part of the part multiply of gemm_matrix.wgsl: the same for the extra rows.
#unroll r EXTRA$share
    let extra_at_$r = (TILE_M + 16u * $ru) * A_LD + 2u * $su;
    let extra_$r = coopLoadT<coop_mat16x16<f16, A>>(&a_tile[extra_at_$r].low, lda);
#unroll j EXTRA_J
#if TRANS_B
    let b_at_extra_$r_$j = (extra_first + 16u * $ju) * B_LD + 2u * $su;
    let b_extra_$r_$j = coopLoad<coop_mat16x16<f16, B>>(&b_tile[b_at_extra_$r_$j].low, ldb);
#else
    let b_at_extra_$r_$j = $su * (16u * B_LD) + (extra_first + 16u * $ju) / 8u;
    let b_extra_$r_$j = coopLoadT<coop_mat16x16<f16, B>>(&b_tile[b_at_extra_$r_$j].low, ldb);
#endif
    extra_acc_$r_$j = coopMultiplyAdd(extra_$r, b_extra_$r_$j, extra_acc_$r_$j);
#end
#end
#endpart

#part store_extra share
// Part of the part tile of gemm_matrix.wgsl: store the sums of the extra rows, 16 x 16 at a time.
#unroll r EXTRA$share
#unroll j EXTRA_J
  {
    coopStoreT(extra_acc_$r_$j, &strips[strip], ld_strip);
    workgroupBarrier();
#unroll q STORES_EXTRA
    {
      let at = lane + $LANESu * $qu;
      let row = m0 + TILE_M + 16u * $ru + at / 4u;
      let col = n0 + extra_first + 16u * $ju + at % 4u * 4u;
      if (row < m_end && col < p.n) { store(row, col, c_base, strips[strip + at / 4u * STRIP + at % 4u]); }
    }
#end
    workgroupBarrier();
  }
#end
#end
#endpart

#part keep share
// Part of gemm_matrix.wgsl: keep what the part fetch has loaded in registers until the next iteration.
#unroll i LOADS_A$share
    ahead_a_$i = next_a_$i;
#end
#unroll i LOADS_EXTRA$share
    ahead_extra_$i = next_extra_$i;
#end
#unroll i LOADS_B
    ahead_b_$i = next_b_$i;
#end
#endpart

#part mine_in_blocks
// Part of gemm_matrix.wgsl: as the part mine, for B in blocks (quantize_decode.wgsl). 32 neighboring invocations load
// one block. They store eights of consecutive rows, which are in different banks: a row has an odd number of eights.
#unroll i LOADS_B
  let b_block_$i = (lid + $iu * THREADS) / 32u;
  let b_eight_$i = (lid + $iu * THREADS) % 32u;
  let b_row_$i = b_block_$i / (B_COLS / 16u) * 16u + b_eight_$i % 16u;
  let b_col_$i = b_block_$i % (B_COLS / 16u) * 16u + b_eight_$i / 16u * 8u;
#end
#endpart

#part from_blocks row column width
// Part of the part fetch of gemm_matrix.wgsl: the address of the invocation's eight in B in blocks.
  let b_from_$i = b_base + (($row) / 16u * ($width / 16u) + ($column) / 16u) * 256u + 8u * b_eight_$i;
#endpart

#part stage from share
// Part of gemm_matrix.wgsl: store a loaded tile of A and B ($from_a_0 ..., $from_b_0 ...) to workgroup memory, as f16,
// with zeros beyond the end of K. DECODE_FIRST: B is decoded before anything is stored, since NVIDIA's compiler keeps
// lookups in workgroup memory behind earlier stores to it.
#if DECODE_FIRST
#unroll i LOADS_B
  let ready_$i = ready_b($from_b_$i);
#unroll e EIGHTS_B
  let low_$i_$e = four_b(ready_$i, 8u * $eu);
  let high_$i_$e = four_b(ready_$i, 8u * $eu + 4u);
#end
#end
#endif
#unroll i LOADS_A$share
#include place x=a eights=1 ld=A_LD inside=a_col_$i,a_row_$i,TRANS_A
#end
#include stage_extra from=$from share=$share
#if DECODE_FIRST
#include place_decoded
#else
#unroll i LOADS_B
#include place x=b eights=EIGHTS_B ld=B_LD inside=b_row_$i,b_col_$i,TRANS_B
#end
#endif
#endpart

#part place_decoded
// Part of the part stage: store B, as decoded with DECODE_FIRST.
#unroll i LOADS_B
#if K_EDGE
  let inside_$i = k0 + select(b_row_$i, b_col_$i, TRANS_B) < k_last;
#endif
#unroll e EIGHTS_B
  {
    let to = b_row_$i * B_LD + b_col_$i / 8u + $eu;
#if K_EDGE
    b_tile[to] = Eight(select(vec4<f16>(), low_$i_$e, inside_$i), select(vec4<f16>(), high_$i_$e, inside_$i));
#else
    b_tile[to] = Eight(low_$i_$e, high_$i_$e);
#endif
  }
#end
#end
#endpart

#part place x eights ld inside
// Part of the part stage of gemm_matrix.wgsl: store unit $i of the operand $x, $eights times 8 elements, from
// $from_$x_$i. $inside: its place along K, as arguments of select.
  {
    let unit = ready_$x($from_$x_$i);
#if K_EDGE
    let inside = k0 + select($inside) < k_last;
#endif
#unroll e $eights
    {
      let to = $x_row_$i * $ld + $x_col_$i / 8u + $eu;
#if K_EDGE
      $x_tile[to] = Eight(select(vec4<f16>(), four_$x(unit, 8u * $eu), inside), select(vec4<f16>(), four_$x(unit, 8u * $eu + 4u), inside));
#else
      $x_tile[to] = Eight(four_$x(unit, 8u * $eu), four_$x(unit, 8u * $eu + 4u));
#endif
    }
#end
  }
#endpart

#part lowrank
// Part of gemm.wgsl and gemm_int8.wgsl: load one tile of the LoRA term, ranks s0 to s0 + TILE_K, into workgroup memory.
// u is divided by alpha, because alpha scales the sum at the end.
fn load_lowrank(s0: u32, m0: u32, n0: u32, lid: u32) {
  for (var at = lid; at < TILE_M * TILE_K; at += THREADS) {
    let row = at / TILE_K;
    let s = at % TILE_K;
    var x = 0.0;
    if (s0 + s < p.rank) { x = u[min(m0 + row, p.m - 1u) * p.ld_u + part_of(n0) * p.rank + s0 + s] / p.alpha; }
    a_tile[s][row >> 2u][row & 3u] = kept(x);
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
    b_tile[s][col >> 2u][col & 3u] = kept(x);
  }
}
#endpart

#part multiply floats
// Part of gemm.wgsl and gemm_int8.wgsl: acc += a_tile times b_tile. $floats converts their elements to vec4<f32>, if
// needed.
#unroll k TILE_K
  {
#unroll i TM4
    let a$i = $floats(a_tile[$k][ty + $iu * TY]);
#end
#unroll j TN4
    let b$j = $floats(b_tile[$k][tx + $ju * TX]);
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
#endpart

#part experts
// Part of gemm.wgsl, gemm_matrix.wgsl and gemv.wgsl: rows of A. In a grouped GEMM (EXPERTS), start [experts + 1] has
// the first row of each expert, and the end. With GATHER, row s of A is that of token order[s] / chosen. These take the
// place of the LoRA term's arrays and parameters, as there is none.
#if GATHER
@group(0) @binding(6) var<storage, read> order: array<i32>;
fn row_of_a(row: u32) -> u32 { return u32(order[row]) / chosen(); }
#else
fn row_of_a(row: u32) -> u32 { return row; }
#endif
#if EXPERTS
@group(0) @binding(4) var<storage, read> start: array<i32>;
fn chosen() -> u32 { return p.ld_u; }

#endif
#endpart

#part narrow from to
// Part of the part range: one step of the binary search for the tile's expert. within: the first and the end.
  let middle_$to = (within_$from.x + within_$from.y) / 2u;
  let is_behind_$to = u32(start[middle_$to]) / TILE_M + middle_$to <= tile;
  let within_$to = select(vec2<u32>(within_$from.x, middle_$to), vec2<u32>(middle_$to, within_$from.y), is_behind_$to);
#endpart

#part tile_of_expert experts
// Part of the part range, and of gemm_matrix_skinny.wgsl: the expert of a tile of TILE_M rows, and the tile's rows.
  // The number of rows of an expert is not known at the launch. Tile t belongs to the last expert e with
  // start[e] / TILE_M + e <= t. So each expert has at least the tiles that it needs, and all have rows / TILE_M +
  // experts. There are no variables, so that a compiler sees uniform control flow, which cooperative operations need.
  let within_0 = vec2<u32>(0u, $experts);
#include narrow from=0 to=1
#include narrow from=1 to=2
#include narrow from=2 to=3
#include narrow from=3 to=4
#include narrow from=4 to=5
#include narrow from=5 to=6
#include narrow from=6 to=7
#include narrow from=7 to=8
#include narrow from=8 to=9
#include narrow from=9 to=10
  let expert = within_10.x;
  let m0 = u32(start[expert]) + (tile - (u32(start[expert]) / TILE_M + expert)) * TILE_M;
  let m_end = u32(start[expert + 1u]);
  if (m0 >= m_end) { return; }
#endpart

#part range
// Part of gemm.wgsl, gemm_matrix.wgsl and gemv.wgsl: the workgroup's tile, its range of K, and where arrays begin.
#if EXPERTS
  let n0 = (p.first_x + wg.x) * TILE_N;
  let tile = p.first_y + wg.y;
#include tile_of_expert experts=p.rank
  let rows_left = m_end - m0;
  let k_first = 0u;
  let k_last = p.k;
  let a_base = 0u;
  let b_base = expert * p.n * p.k;
  let c_base = 0u;
#else
  let m_end = p.m;
#if GROUPED
  // Eight rows of tiles advance along N together, so that B is read from memory once for all of them.
  let columns = (p.n + TILE_N - 1u) / TILE_N;
  let tile_id = (p.first_y + wg.y) * columns + p.first_x + wg.x;
  let first_row = tile_id / (8u * columns) * 8u;
  let rows = min(8u, (p.m + TILE_M - 1u) / TILE_M - first_row);
  let place = tile_id % (8u * columns);
  let m0 = (first_row + place % rows) * TILE_M;
  let n0 = place / rows * TILE_N;
#else
  let m0 = (p.first_y + wg.y) * TILE_M;
  let n0 = (p.first_x + wg.x) * TILE_N;
#endif
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
#endif
#endpart

#part store
// Part of the GEMM kernels: store four sums of a row to C, with alpha, bias and residual; partial sums unchanged.
#if HAS_BIAS
fn bias4(at: u32) -> vec4<f32> { return vec4<f32>(bias[at], bias[at + 1u], bias[at + 2u], bias[at + 3u]); }
#endif
#if SPLIT
fn store(row: u32, col: u32, base: u32, sum: vec4<f32>) {
#if VEC_C
  if (col < p.n) { c[(base + row * p.n + col) >> 2u] = sum; }
#else
#unroll e 4
  if (col + $eu < p.n) { c[base + row * p.n + col + $eu] = sum[$e]; }
#end
#endif
}
#else
fn store(row: u32, col: u32, base: u32, sum: vec4<f32>) {
#if VEC_C
  if (col >= p.n) { return; }
  var x = p.alpha * sum;
  let at = (base + row * p.ldc + p.c_col + col) >> 2u;
#if HAS_BIAS
  x += bias4(p.c_col + col);
#endif
#if HAS_RESIDUAL
#if RESIDUAL_AHEAD
  x += ahead_of_store;
#else
  x += vec4<f32>(residual[at]);
#endif
#endif
#if ACCUMULATE
  x += vec4<f32>(c[at]);
#endif
  c[at] = C_T(x);
#else
#unroll e 4
  if (col + $eu < p.n) {
    let at = base + row * p.ldc + p.c_col + col + $eu;
    var x = p.alpha * sum[$e];
#if HAS_BIAS
    x += bias[p.c_col + col + $eu];
#endif
#if HAS_RESIDUAL
    x += f32(residual[at]);
#endif
#if ACCUMULATE
    x += f32(c[at]);
#endif
    c[at] = C_T(x);
  }
#end
#endif
}
#endif
#endpart

#part store_tile
// Part of gemm.wgsl and gemm_int8.wgsl: store the sums of an invocation to C.
#unroll i TM4
#unroll r 4
  {
    let row = m0 + (ty + $iu * TY) * 4u + $ru;
    if (row < m_end) {
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
#endpart

#part sums
// Part of gemm.wgsl and gemm_int8.wgsl: the sums of an invocation, by row and block of columns.
  var acc: array<array<vec4<f32>, TN4>, ACC_ROWS>;
#unroll i ACC_ROWS
#unroll j TN4
  acc[$i][$j] = vec4<f32>(0.0);
#end
#end
#endpart
