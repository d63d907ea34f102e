// Part of gemm_matrix.wgsl: the operand $x of f32, f16 or bf16 ($kind 0, 1, 2), in units of 8 elements as they lie, to be
// rounded to f16. What it gives is what a weight format gives (nf4.wgsl). 16 bits are read 16 bytes at a time, as words: two
// reads of vec4<f16> stay two, because each has its own bounds.
#if $kind == 0
alias Four_$x = vec4<f32>;
@group(0) @binding($binding) var<storage, read> $x: array<Four_$x>;
struct Unit_$x { low: Four_$x, high: Four_$x }
fn fetch_$x(at: u32, inside: u32) -> Unit_$x { return Unit_$x($x[2u * (at >> 3u)], $x[2u * (at >> 3u) + 1u]); }
fn half_$x(four: Four_$x) -> vec4<f16> { return vec4<f16>(four); }
#else
alias Four_$x = vec2<u32>;
@group(0) @binding($binding) var<storage, read> $x: array<vec4<u32>>;
struct Unit_$x { low: Four_$x, high: Four_$x }
fn fetch_$x(at: u32, inside: u32) -> Unit_$x {
  let words = $x[at >> 3u];
  return Unit_$x(words.xy, words.zw);
}
#if $kind == 1
fn half_$x(four: Four_$x) -> vec4<f16> { return four_of(four); }
#else
fn half_$x(four: Four_$x) -> vec4<f16> {
  return vec4<f16>(vec4<f32>(bitcast<f32>(four.x << 16u), bitcast<f32>(four.x & 0xffff0000u),
                             bitcast<f32>(four.y << 16u), bitcast<f32>(four.y & 0xffff0000u)));
}
#endif
#endif
fn ready_$x(unit: Unit_$x) -> Unit_$x { return unit; }
fn four_$x(unit: Unit_$x, first: u32) -> vec4<f16> {
  if (first == 0u) { return half_$x(unit.low); }
  return half_$x(unit.high);
}
fn prepare_$x(lid: u32) {}
