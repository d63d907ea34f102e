// Parts of the gated delta rule on tensor cores: f16 operands, f32 sums. KEYS and VALUES are multiples of 64.

#part products
// Part of the kernels with matmuls of 64 x 64: operands in workgroup memory, DEEP of the inner dimension at a time.
// Each of 8 subgroups has 16 rows and half of the columns. Sums pass through `strips`. Rows of operands are padded, so
// that neighbors start in different banks: rows along the inner dimension have RUN_LD vec4, rows across it ACROSS_LD.
const THREADS = 256u;
const RUN = DEEP / 4u;
const RUN_LD = RUN + 2u;
const ACROSS_LD = 18u;
var<workgroup> left: array<vec4<f16>, CHUNK * RUN_LD>;
var<workgroup> right: array<vec4<f16>, CHUNK * RUN_LD>;
var<workgroup> strips: array<vec4<f32>, 1024>;

// An invocation's four rows of a tile.
struct Tile { r0: vec4<f32>, r1: vec4<f32>, r2: vec4<f32>, r3: vec4<f32> }
#endpart

#part place
// Part of the kernels with matmuls: the place of the invocation (first row i, first column j) and of its subgroup.
  let group = p.first + wg.x + wg.y * nwg.x;
  if (group >= p.end) { return; }
  let tx = lid % 16u;
  let ty = lid / 16u;
  let i = 4u * ty;
  let j = 4u * tx;
  let block_row = lid / 32u % 4u;
  let block_column = lid / 128u * 2u;
  let run_ld = RUN_LD;
  let across_ld = ACROSS_LD;
  let strip_ld = 16u;
  choose(group / p.chunks, group % p.chunks);
#endpart

#part sums
  {
#unroll f 2
  var sums_$f = coop_mat16x16<f32, C>();
#end
#endpart

#part summed
// Part of the kernels with matmuls: the sums become the tile.
#unroll f 2
  let strip_at_$f = 256u * block_row + 4u * (block_column + $fu);
  coopStoreT(sums_$f, &strips[strip_at_$f], strip_ld);
#end
  workgroupBarrier();
#unroll n 4
  tile.r$n = strips[16u * (i + $nu) + tx];
#end
  }
#endpart

#part along_both lhs rhs inner
// Part of the kernels with matmuls: sums += $lhs(row, n / 4) $rhs(column, n / 4), each four of the inner dimension.
  for (var n = 0u; n < $inner; n += DEEP) {
#unroll e RUNS
    let lhs_$e = vec4<f16>($lhs((lid + $eu * THREADS) / RUN, n / 4u + (lid + $eu * THREADS) % RUN));
    let rhs_$e = vec4<f16>($rhs((lid + $eu * THREADS) / RUN, n / 4u + (lid + $eu * THREADS) % RUN));
#end
    workgroupBarrier();
#unroll e RUNS
    left[(lid + $eu * THREADS) / RUN * RUN_LD + (lid + $eu * THREADS) % RUN] = lhs_$e;
    right[(lid + $eu * THREADS) / RUN * RUN_LD + (lid + $eu * THREADS) % RUN] = rhs_$e;
#end
    workgroupBarrier();
#unroll s RUNS
    let left_at_$s = 16u * block_row * RUN_LD + 4u * $su;
    let left_$s = coopLoadT<coop_mat16x16<f16, A>>(&left[left_at_$s], run_ld);
#unroll f 2
    let right_at_$s_$f = 16u * (block_column + $fu) * RUN_LD + 4u * $su;
    let right_$s_$f = coopLoad<coop_mat16x16<f16, B>>(&right[right_at_$s_$f], run_ld);
    sums_$f = coopMultiplyAdd(left_$s, right_$s_$f, sums_$f);
#end
#end
  }
#endpart

#part along_left lhs rhs inner
// Part of the kernels with matmuls: sums += $lhs(row, n / 4) (four of the inner dimension) $rhs(n, column / 4)
// (columns).
  for (var n = 0u; n < $inner; n += DEEP) {
#unroll e RUNS
    let lhs_$e = vec4<f16>($lhs((lid + $eu * THREADS) / RUN, n / 4u + (lid + $eu * THREADS) % RUN));
    let rhs_$e = vec4<f16>($rhs(n + (lid + $eu * THREADS) / 16u, (lid + $eu * THREADS) % 16u));
#end
    workgroupBarrier();
#unroll e RUNS
    left[(lid + $eu * THREADS) / RUN * RUN_LD + (lid + $eu * THREADS) % RUN] = lhs_$e;
    right[(lid + $eu * THREADS) / 16u * ACROSS_LD + (lid + $eu * THREADS) % 16u] = rhs_$e;
#end
    workgroupBarrier();
#unroll s RUNS
    let left_at_$s = 16u * block_row * RUN_LD + 4u * $su;
    let left_$s = coopLoadT<coop_mat16x16<f16, A>>(&left[left_at_$s], run_ld);
#include times_across
#end
  }
#endpart

#part along_none lhs rhs inner
// Part of the kernels with matmuls: sums += $lhs(n, row / 4) (four rows) $rhs(n, column / 4) (four columns).
  for (var n = 0u; n < $inner; n += DEEP) {
#unroll e RUNS
    let lhs_$e = vec4<f16>($lhs(n + (lid + $eu * THREADS) / 16u, (lid + $eu * THREADS) % 16u));
    let rhs_$e = vec4<f16>($rhs(n + (lid + $eu * THREADS) / 16u, (lid + $eu * THREADS) % 16u));
#end
    workgroupBarrier();
#unroll e RUNS
    left[(lid + $eu * THREADS) / 16u * ACROSS_LD + (lid + $eu * THREADS) % 16u] = lhs_$e;
    right[(lid + $eu * THREADS) / 16u * ACROSS_LD + (lid + $eu * THREADS) % 16u] = rhs_$e;
#end
    workgroupBarrier();
#unroll s RUNS
    let left_at_$s = 16u * $su * ACROSS_LD + 4u * block_row;
    let left_$s = coopLoad<coop_mat16x16<f16, A>>(&left[left_at_$s], across_ld);
#include times_across
#end
  }
#endpart

#part times_across
#unroll f 2
    let right_at_$s_$f = 16u * $su * ACROSS_LD + 4u * (block_column + $fu);
    let right_$s_$f = coopLoadT<coop_mat16x16<f16, B>>(&right[right_at_$s_$f], across_ld);
    sums_$f = coopMultiplyAdd(left_$s, right_$s_$f, sums_$f);
#end
#endpart

#part fours
// Part of the kernels with matmuls: four elements of a token's q and k (normalized) and v (0 beyond the last token).
var<private> width4: u32;  // of a token's channels
var<private> query4: u32;
var<private> key4: u32;
fn place_channels() {
  width4 = (2u * key_width() + p.heads * p.values) / 4u;
  query4 = key_head() * p.keys / 4u;
  key4 = key_width() / 4u + query4;
}
fn channels(i: u32) -> u32 { return (row + min(i, count - 1u)) * width4; }
fn query(i: u32, d: u32) -> vec4<f32> { return vec4<f32>(qkv[channels(i) + query4 + d]) * q_unit[i]; }
fn key(i: u32, d: u32) -> vec4<f32> { return vec4<f32>(qkv[channels(i) + key4 + d]) * k_unit[i]; }
fn value(i: u32, c: u32) -> vec4<f32> {
  let x = vec4<f32>(qkv[channels(i) + (key_width() / 2u) + head % p.heads * values4() + c]);
  return select(vec4<f32>(0.0), x, i < count);
}
fn decays(i: u32, j: u32) -> vec4<f32> { return vec4<f32>(decay(i, j), decay(i, j + 1u), decay(i, j + 2u), decay(i, j + 3u)); }
#endpart

#part scan
// Part of delta_rule_scan*_matrix.wgsl. Workgroup memory has two right operands of 32 columns, a state of KEYS rows and
// 64 tokens, and a left operand. Each of 8 subgroups has 16 of 64 rows and half of the columns of a sum, which passes
// through `strips`. Rows are padded, so that neighbors start in different banks.
const TOKEN_LD = KEYS / 4u + 2u;  // for left operands with a row per token; KEY_LD for those with a row per key
const KEY_LD = 18u;
const RIGHT_LD = 10u;
const STRIP = 8u;
var<workgroup> left: array<vec4<f16>, KEYS * KEY_LD>;
var<workgroup> state_tile: array<vec4<f16>, KEYS * RIGHT_LD>;
var<workgroup> token_tile: array<vec4<f16>, CHUNK * RIGHT_LD>;
var<workgroup> strips: array<vec4<f32>, CHUNK * STRIP>;

var<private> column: u32;  // the four columns of an invocation
fn state_at(slot: u32, d: u32) -> u32 { return cell(slot, d, 0u) / 4u + column; }
// The share of the incoming state that is left at the chunk's end.
fn whole_chunk() -> f32 {
  return select(0.0, exp(info[plane(0u, count - 1u)] + info[plane(5u, count - 1u)]), info[plane(4u, count - 1u)] < 0.0);
}
#endpart

#part begin states slot
// Part of delta_rule_scan*_matrix.wgsl: the invocation's place, and its rows of the state.
  let group = p.first + wg.x + wg.y * nwg.x;
  if (group >= p.end) { return; }
  let of_head = group / p.tiles;
  let place = lid % 8u;
  let first_row = lid / 8u;
  let block_row = lid / 32u % 4u;
  let block_column = lid / 128u;
  let token_ld = TOKEN_LD;
  let key_ld = KEY_LD;
  let right_ld = RIGHT_LD;
  let strip_ld = STRIP;
  let strip_at = 16u * block_row * STRIP + 4u * block_column;
  column = group % p.tiles * 8u + place;
  choose(of_head, 0u);
#unroll h HALVES
#unroll m 2
  var state_$h_$m = $states[state_at($slot, first_row + 64u * $hu + 32u * $mu)];
  state_tile[(first_row + 64u * $hu + 32u * $mu) * RIGHT_LD + place] = vec4<f16>(state_$h_$m);
#end
#end
#endpart

#part read x number
// Part of delta_rule_scan*_matrix.wgsl: load a left operand into registers.
#unroll n LOADS
    let $x_$n = operands[operand($number) + lid + 256u * $nu];
#end
#endpart

#part stage x width ld
#unroll n LOADS
    left[(lid + 256u * $nu) / $width * $ld + (lid + 256u * $nu) % $width] = $x_$n;
#end
#endpart

#part by_state
// Part of delta_rule_scan*_matrix.wgsl: strips = a left operand with a row per key, times the state.
    var by_state = coop_mat16x16<f32, C>();
#unroll s KEY_STEPS
    let key_at_$s = 16u * $su * KEY_LD + 4u * block_row;
    let row_at_$s = 16u * $su * RIGHT_LD + 4u * block_column;
    let key_left_$s = coopLoad<coop_mat16x16<f16, A>>(&left[key_at_$s], key_ld);
    let key_right_$s = coopLoadT<coop_mat16x16<f16, B>>(&state_tile[row_at_$s], right_ld);
    by_state = coopMultiplyAdd(key_left_$s, key_right_$s, by_state);
#end
    coopStoreT(by_state, &strips[strip_at], strip_ld);
    workgroupBarrier();
#endpart

#part by_tokens what
// Part of delta_rule_scan*_matrix.wgsl: more_<half> += a left operand with a row per token, times the tile of tokens.
#unroll h HALVES
#unroll s 4
    let $what_at_$h_$s = 16u * $su * TOKEN_LD + 16u * $hu + 4u * block_row;
    let $what_from_$h_$s = 16u * $su * RIGHT_LD + 4u * block_column;
    let $what_left_$h_$s = coopLoad<coop_mat16x16<f16, A>>(&left[$what_at_$h_$s], token_ld);
    let $what_right_$h_$s = coopLoadT<coop_mat16x16<f16, B>>(&token_tile[$what_from_$h_$s], right_ld);
    more_$h = coopMultiplyAdd($what_left_$h_$s, $what_right_$h_$s, more_$h);
#end
#end
#endpart

#part next states slot
// Part of delta_rule_scan*_matrix.wgsl: the state on the other side of a chunk.
#unroll h HALVES
    coopStoreT(more_$h, &strips[strip_at], strip_ld);
    workgroupBarrier();
#unroll m 2
    state_$h_$m = whole * state_$h_$m + strips[(first_row + 32u * $mu) * STRIP + place];
    state_tile[(first_row + 64u * $hu + 32u * $mu) * RIGHT_LD + place] = vec4<f16>(state_$h_$m);
    $states[state_at($slot, first_row + 64u * $hu + 32u * $mu)] = state_$h_$m;
#end
    workgroupBarrier();
#end
#endpart
