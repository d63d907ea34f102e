// Part of the weight formats whose units have a scale, and a minimum of which `least` is the negative: as scaled.wgsl.
fn by_scale_and_least(unit: Ready_b, codes: vec4<f32>) -> Four {
#if FACTORED
  return Four(codes);
#else
  return Four(unit.scale * codes - vec4<f32>(unit.least));
#endif
}

#if FACTORED
fn scaled_b(unit: Ready_b, first: u32, sum: f32, x: f32) -> f32 { return unit.scale * sum - unit.least * x; }
#endif
