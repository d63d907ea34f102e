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
