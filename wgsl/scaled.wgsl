// Part of the weight formats whose units have one scale: elements of the unit from their codes; or, FACTORED, the codes, and the
// scale on the sum that is made of them (nf4.wgsl).
fn by_scale(unit: Ready_b, codes: vec4<f32>) -> Four {
#if FACTORED
  return Four(codes);
#else
  return Four(unit.scale * codes);
#endif
}

#if FACTORED
fn scaled_b(unit: Ready_b, first: u32, sum: f32, x: f32) -> f32 { return unit.scale * sum; }
#endif
