// Part of gemm_matrix.wgsl: the operand $x of f32, f16 or bf16 ($kind 0, 1, 2), in units of 8 elements as they lie, to be
// rounded to f16. What it gives is what a weight format gives (nf4.wgsl).
#if $kind == 2
alias Raw_$x = vec2<u32>;
fn half_$x(raw: Raw_$x) -> vec4<f16> {
  return vec4<f16>(vec4<f32>(bitcast<f32>(raw.x << 16u), bitcast<f32>(raw.x & 0xffff0000u),
                             bitcast<f32>(raw.y << 16u), bitcast<f32>(raw.y & 0xffff0000u)));
}
#else
#if $kind == 1
alias Raw_$x = vec4<f16>;
#else
alias Raw_$x = vec4<f32>;
#endif
fn half_$x(raw: Raw_$x) -> vec4<f16> { return vec4<f16>(raw); }
#endif
@group(0) @binding($binding) var<storage, read> $x: array<Raw_$x>;
struct Unit_$x { low: Raw_$x, high: Raw_$x }

fn fetch_$x(at: u32, inside: u32) -> Unit_$x { return Unit_$x($x[at >> 2u], $x[(at >> 2u) + 1u]); }
fn ready_$x(unit: Unit_$x) -> Unit_$x { return unit; }
fn four_$x(unit: Unit_$x, first: u32) -> vec4<f16> {
  if (first == 0u) { return half_$x(unit.low); }
  return half_$x(unit.high);
}
fn prepare_$x(lid: u32) {}
