// Gradients of a LoRA term from one reading of dy, on tensor cores: dy f16 [rows, columns]; b f32 [columns, rank] and
// u f32 [rows, parts rank] in two pieces of f16, the rounded value and the remainder; f32 sums.
//
//   du [shares, rows, rank] = dy b            over the columns of a share, for each share of columns
//   db [row blocks, columns, rank] = dy^T u   over the rows of a row block
//
// gemm_matrix_lora_reduce.wgsl adds them up. Dispatch: x = shares; y = row blocks, from first_block on.
// Columns of a stack belong to parts, which begin at column_1 and column_2; shares of `share` columns begin anew in each
// part, and share_1, share_2 are the first of those parts. rank is at most 16 and a multiple of 4.
// A workgroup of SGS subgroups of LANES invocations takes ROUNDS blocks of 16 SGS rows, and walks the columns of its
// share in tiles of 16 CF. A subgroup owns 16 rows of each block. Its sums of du, and the pieces of u, are in registers
// for the whole share; those of db, and the pieces of b, for a tile. The next AHEAD blocks are in registers or being
// loaded while one is multiplied.
// Needs: subgroups of LANES; columns a multiple of 16; ROUNDS a multiple of AHEAD.
enable f16;
enable wgpu_cooperative_matrix;

struct Params {
  rows: u32, columns: u32, rank: u32, ld_u: u32,
  column_1: u32, column_2: u32, share_1: u32, share_2: u32, share: u32, first_block: u32, zero: u32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> b: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> u: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> du: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> db: array<vec4<f32>>;

#include "common.inc.wgsl" optimization_barrier
#include "common.inc.wgsl" matrix_pieces

const THREADS: u32 = $LANESu * SGS;
const BLOCK_ROWS: u32 = 16u * SGS;
const TILE: u32 = 16u * CF;
// Rows are in eights; those of an odd number of eights start in different banks.
const X_WIDTH: u32 = 2u * CF;
const X_LD: u32 = X_WIDTH + 1u;
const S_LD: u32 = 3u;  // a row of pieces has 16 ranks
const B_PIECES: u32 = TILE * S_LD;
const U_PIECES: u32 = BLOCK_ROWS * S_LD;

var<workgroup> block: array<Eight, BLOCK_SIZE>;  // of dy, and before the first the pieces of u
var<workgroup> pieces: array<Eight, 2u * B_PIECES>;
var<workgroup> strips: array<vec4<f32>, SGS * FLUSH * 64u>;

// Ranks r to r + 3 of a column, zeros from `end` on. Sums of ranks beyond the last are not stored.
fn four_b(column: u32, r: u32, end: u32) -> vec4<f32> {
  let four = b[(min(column, p.columns - 1u) * p.rank + min(r, p.rank - 4u)) / 4u];
  return select(vec4<f32>(), four, column < end);
}

// Ranks r to r + 3 of a row and part, zeros beyond the last row.
fn four_u(row: u32, r: u32, first: u32) -> vec4<f32> {
  let four = u[(min(row, p.rows - 1u) * p.ld_u + first + min(r, p.rank - 4u)) / 4u];
  return select(vec4<f32>(), four, row < p.rows);
}

#if LANES == 32
@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#else
@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32, @builtin(subgroup_id) subgroup_id: u32) {
#endif
#include "common.inc.wgsl" subgroup_index
  let lane = lid % $LANESu;
  let mine = subgroup * 16u;  // the first row of the subgroup in a block
#unroll e X_LOADS
  let x_place_$e = mine * X_WIDTH + lane + $LANESu * $eu;  // of the invocation's units, all in rows of its subgroup
#end
  let ld = 2u * S_LD;  // row stride for cooperative loads, in vec4<f16>
  let ld_x = 2u * X_LD;
  let ld_strip = 4u;
  let row_block = p.first_block + wg.y;
  let row0 = row_block * (ROUNDS * BLOCK_ROWS);
  let part = u32(wg.x >= p.share_1) + u32(wg.x >= p.share_2);
  let first_share = select(select(0u, p.share_1, part > 0u), p.share_2, part > 1u);
  let part_first = select(select(0u, p.column_1, part > 0u), p.column_2, part > 1u);
  let part_end = select(select(p.column_1, p.column_2, part > 0u), p.columns, part > 1u);
  let column_first = part_first + (wg.x - first_share) * p.share;
  let column_end = min(part_end, column_first + p.share);
  let tiles = (column_end - column_first + TILE - 1u) / TILE;

#unroll g GROUPS
#unroll a AHEAD
#unroll e U_LOADS
  {
    let at = lid + THREADS * $eu;
    let row = row0 + ($gu * AHEAD + $au) * BLOCK_ROWS + at / 2u;
    let low = four_u(row, at % 2u * 8u, part * p.rank);
    let high = four_u(row, at % 2u * 8u + 4u, part * p.rank);
    if (at < 2u * BLOCK_ROWS) {
#include pieces_of to=block rest=U_PIECES
    }
  }
#end
  workgroupBarrier();
  let u_at_$g_$a = mine * S_LD;
  let u_0_$g_$a = coopLoad<coop_mat16x16<f16, A>>(&block[u_at_$g_$a].low, ld);
  let u_rest_at_$g_$a = U_PIECES + mine * S_LD;
  let u_1_$g_$a = coopLoad<coop_mat16x16<f16, A>>(&block[u_rest_at_$g_$a].low, ld);
  var du_$g_$a = coop_mat16x16<f32, C>();
  workgroupBarrier();
#end
#end
#unroll e B_LOADS
  var b_low_$e: vec4<f32>;
  var b_high_$e: vec4<f32>;
#end
  {
    let column0 = column_first;
#include fetch_b
  }
#unroll a AHEAD
#unroll e X_LOADS
  var ahead_$a_$e: vec4<u32>;
#end
  {
    let from_row = row0 + $au * BLOCK_ROWS;
    let column0 = column_first;
#include fetch
#include keep
  }
#end
  // The last tile comes after the loop: if loads were used only in the next iteration, NVIDIA's compiler would move them
  // there (bench/notes/rejected-tensor-cores.md).
  for (var t = 1u; t < tiles; t++) {
    let tile_first = column_first + (t - 1u) * TILE;
#include tile
  }
  {
    let tile_first = column_first + (tiles - 1u) * TILE;
#include tile
  }
#unroll g GROUPS
#unroll a AHEAD
  {
    let at_du = subgroup * (FLUSH * 64u);
    coopStoreT(du_$g_$a, &strips[at_du], ld_strip);
#include "common.inc.wgsl" subgroup_wait
    for (var e = lane; e < 64u; e += $LANESu) {
      let row = row0 + ($gu * AHEAD + $au) * BLOCK_ROWS + mine + e / 4u;
      let r = e % 4u * 4u;
      if (row < p.rows && r < p.rank) { du[((wg.x * p.rows + row) * p.rank + r) / 4u] = strips[at_du + e]; }
    }
#include "common.inc.wgsl" subgroup_wait
  }
#end
#end
}

#part pieces_of to rest
// Part of gemm_matrix_lora.wgsl: store the two pieces of eight numbers, low and high.
        let held_low = held(low);
        let held_high = held(high);
        let place = at / 2u * S_LD + at % 2u;
        $to[place] = Eight(vec4<f16>(held_low), vec4<f16>(held_high));
        let rest_place = place + $rest;
        $to[rest_place] = Eight(vec4<f16>(low - held_low), vec4<f16>(high - held_high));
#endpart

#part fetch_b
// Part of gemm_matrix_lora.wgsl: load the ranks of the columns from column0 on into registers.
#unroll e B_LOADS
    b_low_$e = four_b(column0 + (lid + THREADS * $eu) / 2u, (lid + THREADS * $eu) % 2u * 8u, column_end);
    b_high_$e = four_b(column0 + (lid + THREADS * $eu) / 2u, (lid + THREADS * $eu) % 2u * 8u + 4u, column_end);
#end
#endpart

#part fetch
// Part of gemm_matrix_lora.wgsl: load the block of dy at from_row and column0 into registers, without a branch, so that
// all loads overlap. Beyond the end, the last elements are repeated, and multiplied by zeros.
#unroll e X_LOADS
    let from_$e = min(from_row + x_place_$e / X_WIDTH, p.rows - 1u) * p.columns;
    let next_$e = x[(from_$e + min(column0 + 8u * (x_place_$e % X_WIDTH), p.columns - 8u)) / 8u];
#end
#endpart

#part keep
// Part of gemm_matrix_lora.wgsl: keep what the part fetch has loaded in the registers of set $a.
#unroll e X_LOADS
    ahead_$a_$e = next_$e;
#end
#endpart

#part tile
// Part of gemm_matrix_lora.wgsl: multiply the tile at tile_first, and store its sums of db.
#unroll e B_LOADS
  {
    let at = lid + THREADS * $eu;
    let low = b_low_$e;
    let high = b_high_$e;
    if (at < 2u * TILE) {
#include pieces_of to=pieces rest=B_PIECES
    }
  }
#end
  workgroupBarrier();
  {
    let column0 = tile_first + TILE;
#include fetch_b
  }
#unroll f FLUSHES
#unroll j FLUSH
  let b_at_$f_$j = ($fu * FLUSH + $ju) * (16u * S_LD);
  let b_0_$f_$j = coopLoadT<coop_mat16x16<f16, B>>(&pieces[b_at_$f_$j].low, ld);
  let b_rest_at_$f_$j = B_PIECES + ($fu * FLUSH + $ju) * (16u * S_LD);
  let b_1_$f_$j = coopLoadT<coop_mat16x16<f16, B>>(&pieces[b_rest_at_$f_$j].low, ld);
  var db_$f_$j = coop_mat16x16<f32, C>();
#end
#end
#unroll g GROUPS
#unroll a AHEAD
  {
#unroll e X_LOADS
    let to_$e = x_place_$e / X_WIDTH * X_LD + x_place_$e % X_WIDTH;
    block[to_$e] = Eight(four_of(ahead_$a_$e.xy), four_of(ahead_$a_$e.zw));
#end
#include "common.inc.wgsl" subgroup_wait
    let from_row = row0 + (($gu + 1u) % GROUPS * AHEAD + $au) * BLOCK_ROWS;
    let column0 = tile_first + ($gu + 1u) / GROUPS * TILE;
#include fetch
#unroll f FLUSHES
#unroll j FLUSH
    {
      let x_at_$f_$j = mine * X_LD + 2u * ($fu * FLUSH + $ju);
      let x_rows = coopLoadT<coop_mat16x16<f16, A>>(&block[x_at_$f_$j].low, ld_x);
      du_$g_$a = coopMultiplyAdd(x_rows, b_0_$f_$j, du_$g_$a);
      du_$g_$a = coopMultiplyAdd(x_rows, b_1_$f_$j, du_$g_$a);
      let x_columns = coopLoadT<coop_mat16x16<f16, B>>(&block[x_at_$f_$j].low, ld_x);
      db_$f_$j = coopMultiplyAdd(u_0_$g_$a, x_columns, db_$f_$j);
      db_$f_$j = coopMultiplyAdd(u_1_$g_$a, x_columns, db_$f_$j);
    }
#end
#end
#include "common.inc.wgsl" subgroup_wait
#include keep
  }
#end
#end
#unroll f FLUSHES
#unroll j FLUSH
  let db_at_$f_$j = subgroup * (FLUSH * 64u) + $ju * 64u;
  coopStoreT(db_$f_$j, &strips[db_at_$f_$j], ld_strip);
#end
  workgroupBarrier();
  for (var e = lid; e < FLUSH * 64u; e += THREADS) {
    let column = e / 64u * 16u + e % 16u;  // of the sums, which are transposed
    let r = e / 16u % 4u * 4u;
    let at = e / 64u * 64u + r * 4u + e % 16u / 4u;
    var sum = vec4<f32>();
    for (var other = at; other < SGS * FLUSH * 64u; other += FLUSH * 64u) {
#unroll k 4
      sum[$k] += strips[other + 4u * $ku][e % 4u];
#end
    }
    let to = tile_first + $fu * (FLUSH * 16u) + column;
    if (to < column_end && r < p.rank) { db[((row_block * p.columns + to) * p.rank + r) / 4u] = sum; }
  }
  workgroupBarrier();
#end
#endpart
