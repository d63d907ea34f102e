// Parts that shaders of several families include.

#part optimization_barrier
// Part of others: hides bits from the compiler, so that it cannot optimize across. p.zero is 0 at every launch.
fn optimization_barrier(bits: u32) -> u32 { return bits | p.zero; }
#endpart

#part softcap of T
// tanh of $of ($T) to the last digits of float32: WGSL's own may be off by 1e-5, and may overflow for large arguments.
// Source: Cephes, tanhf (Moshier): a polynomial near 0, where 1 - exp(-2 |x|) loses digits.
fn tanh_of_$of(x: $T) -> $T {
  let z = x * x;
  let e = exp(-2.0 * abs(x));
  let poly = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z;
  return select(sign(x) * ((1.0 - e) / (1.0 + e)), x + x * z * (poly - 3.33332819422e-1), abs(x) < $T(0.625));
}
#endpart

#part eight
// Part of the tensor-core kernels: 16 bytes in workgroup memory, so that one store writes them. 16-bit elements are
// loaded 16 bytes at a time, as words: two loads of vec4<f16> would stay two, because each has its own bounds check.
struct Eight { low: vec4<f16>, high: vec4<f16> }
fn four_of(words: vec2<u32>) -> vec4<f16> { return vec4<f16>(vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y))); }
#endpart

#part subgroup_index
// Part of the tensor-core kernels: the index of the subgroup in its workgroup. Lanes are numbered in order, as a probe
// checks (cooperative.py), so for 32 lanes it is computed: that is how NVIDIA was measured.
#if LANES == 32
  let subgroup = lid / $LANESu;
#else
  let subgroup = subgroup_id;
#endif
#endpart

#part subgroup_wait
// Part of the tensor-core kernels: order what a subgroup writes to workgroup memory, and reads there. WGSL promises that
// of a barrier of the workgroup alone; on NVIDIA's GPUs one of the subgroup does it (bench/notes/barriers.md).
#if SUBGROUP_BARRIER
    subgroupBarrier();
#else
    workgroupBarrier();
#endif
#endpart

#part dense x binding kind vec
// Part of others: the array $x of f32, f16 or bf16 ($kind 0, 1, 2), read one by one, or four at once where $vec. 16-bit
// floats are read as words of two, which needs no device feature.
#if $vec
#if $kind == 0
@group(0) @binding($binding) var<storage, read> $x: array<vec4<f32>>;
fn read_$x(i: u32) -> vec4<f32> { return $x[i]; }
#else
@group(0) @binding($binding) var<storage, read> $x: array<vec2<u32>>;
fn read_$x(i: u32) -> vec4<f32> {
  let w = $x[i];
#if $kind == 1
  return vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y));
#else
  return bitcast<vec4<f32>>(vec4<u32>(w.x << 16u, w.x & 0xffff0000u, w.y << 16u, w.y & 0xffff0000u));
#endif
}
#endif
#else
#if $kind == 0
@group(0) @binding($binding) var<storage, read> $x: array<f32>;
fn read_$x(i: u32) -> f32 { return $x[i]; }
#else
@group(0) @binding($binding) var<storage, read> $x: array<u32>;
fn read_$x(i: u32) -> f32 {
  let w = $x[i >> 1u];
#if $kind == 1
  return unpack2x16float(w)[i & 1u];
#else
  return bitcast<f32>(select(w << 16u, w & 0xffff0000u, (i & 1u) == 1u));
#endif
}
#endif
#endif
#endpart

#part matrix_dense x binding kind
// Part of gemm_matrix.wgsl: the operand $x of f32, f16 or bf16 ($kind 0, 1, 2), in units of 8 elements, rounded to f16,
// with the interface of a weight format (nf4.inc.wgsl). 16-bit elements are loaded 16 bytes at a time, as words: two
// loads of vec4<f16> would stay two, because each has its own bounds check.
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
#endpart

#part matrix_pieces
// Part of gemm_matrix.wgsl and gemm_matrix_skinny.wgsl: tiles in workgroup memory, and float32 as two pieces of f16.

#include eight

// x rounded to f16; the other piece is x minus that. Without the barrier, NVIDIA's compiler takes f32(f16(x)) for x,
// and the other piece is zero.
fn held(x: vec4<f32>) -> vec4<f32> {
  return vec4<f32>(unpack2x16float(optimization_barrier(pack2x16float(x.xy))),
                   unpack2x16float(optimization_barrier(pack2x16float(x.zw))));
}
#endpart
