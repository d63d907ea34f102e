// Part of others: the array $x of f32, f16 or bf16 ($kind 0, 1, 2), read number by number, or four at once where $vec.
// Floats of 2 bytes are read as words of two, which needs no device feature.
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
