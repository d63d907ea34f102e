// Part of gemm_matrix_skinny.wgsl: four numbers of S, zeros beyond its ranks and beyond k_last.
#if VEC_S
#if BY_STEPS
// Ranks r to r + 3 of step k.
fn four_s(r: u32, k: u32, k_last: u32, first_s: u32) -> vec4<f32> {
  let four = s[(min(k, k_last - 1u) * p.ld_s + first_s + min(r, (p.rank - 1u) / 4u * 4u)) / 4u];
  return select(vec4<f32>(), four, vec4<bool>(k < k_last) & (vec4<u32>(r, r + 1u, r + 2u, r + 3u) < vec4<u32>(p.rank)));
}
#else
// Steps k to k + 3 of rank r.
fn four_s(r: u32, k: u32, k_last: u32, first_s: u32) -> vec4<f32> {
  let four = s[((first_s + min(r, p.rank - 1u)) * p.ld_s + min(k, k_last - 4u)) / 4u];
  return select(vec4<f32>(), four, r < p.rank && k < k_last);
}
#endif
#else
fn four_s(r: u32, k: u32, k_last: u32, first_s: u32) -> vec4<f32> {
#if RANK_INNER
  let first = min(k, k_last - 4u) * p.ld_s + first_s + min(r, p.rank - 1u);
  let step = p.ld_s;
#else
  let first = (first_s + min(r, p.rank - 1u)) * p.ld_s + min(k, k_last - 4u);
  let step = 1u;
#endif
  let four = vec4<f32>(s[first], s[first + step], s[first + 2u * step], s[first + 3u * step]);
  return select(vec4<f32>(), four, r < p.rank && k < k_last);
}
#endif
