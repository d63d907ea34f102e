// Part of every attention kernel: the base of its exponents, and the mask.
const LOG2E: f32 = 1.4426950408889634;

// The first key that the query at `position` of a document from `start` on sees.
fn first_seen(start: i32, position: u32) -> u32 {
  if (p.window == 0u) { return u32(start); }
  return max(u32(start), position + 1u - min(p.window, position + 1u));
}
