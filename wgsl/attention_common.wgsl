// Part of every attention kernel: the base of its exponents, and the mask.
const LOG2E: f32 = 1.4426950408889634;

#if SOFTCAP
#include "softcap.wgsl" of=scores T=vec4<f32>

// The soft-cap of scores, which are exponents in base 2 here.
const CAP: f32 = SOFTCAP * LOG2E;
fn capped(s: vec4<f32>) -> vec4<f32> { return CAP * tanh_of_scores(s / CAP); }
fn cap_slope(y: vec4<f32>) -> vec4<f32> { return 1.0 - (y / CAP) * (y / CAP); }  // the derivative of y = capped(s)
#endif

// The first key that the query at `position` of a document from `start` on sees.
fn first_seen(start: i32, position: u32) -> u32 {
  if (p.window == 0u) { return u32(start); }
  return max(u32(start), position + 1u - min(p.window, position + 1u));
}
