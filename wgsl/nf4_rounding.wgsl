// The product scale * level, rounded to nearest even in float16 (ROUND 1) or bfloat16 (2) by its bits: what WGSL itself
// rounds to 16 bits may go either way.
fn rounded(v: vec4<f32>) -> vec4<f32> {
#if ROUND == 0
  return v;
#else
  let u = bitcast<vec4<u32>>(v);
#if ROUND == 2
  return bitcast<vec4<f32>>((u + vec4<u32>(0x7fffu) + ((u >> vec4<u32>(16u)) & vec4<u32>(1u))) & vec4<u32>(0xffff0000u));
#else
  let size = u & vec4<u32>(0x7fffffffu);
  let exponent = size >> vec4<u32>(23u);
  // Ten bits of the mantissa stay; below 2^-14 one less for each power of 2, down to none at 2^-24.
  let drop = min(vec4<u32>(13u) + (max(exponent, vec4<u32>(113u)) - exponent), vec4<u32>(23u));
  let below_half = (vec4<u32>(1u) << (drop - vec4<u32>(1u))) - vec4<u32>(1u);
  let near = ((size + below_half + ((size >> drop) & vec4<u32>(1u))) >> drop) << drop;
  let least = select(vec4<u32>(0u), vec4<u32>(0x33800000u), size > vec4<u32>(0x33000000u));  // 2^-24 from above 2^-25 on
  let result = select(near, least, size < vec4<u32>(0x33800000u));
  return bitcast<vec4<f32>>(result | (u & vec4<u32>(0x80000000u)));
#endif
#endif
}
