// End of a decoding step of B sequences: tokens[step] = drawn, ids = drawn (0 for -1), positions += 1, cache_len += 1,
// step += 1, uniform = uniforms[step]. From step P on, tokens and uniform do not change.
//   drawn, ids, positions [B], tokens [P, B], step, cache_len [1] i32; uniforms [P, B], uniform [B] f32.
// Dispatch: one workgroup of 64.
struct Params { steps: u32, rows: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> drawn: array<i32>;
@group(0) @binding(2) var<storage, read> uniforms: array<f32>;
@group(0) @binding(3) var<storage, read_write> tokens: array<i32>;
@group(0) @binding(4) var<storage, read_write> step: array<i32>;
@group(0) @binding(5) var<storage, read_write> ids: array<i32>;
@group(0) @binding(6) var<storage, read_write> positions: array<i32>;
@group(0) @binding(7) var<storage, read_write> cache_len: array<i32>;
@group(0) @binding(8) var<storage, read_write> uniform_number: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) lid: u32) {
  let now = u32(step[0]);
  storageBarrier();  // all have read it
  for (var row = lid; row < p.rows; row += 64u) {
    if (now < p.steps) { tokens[now * p.rows + row] = drawn[row]; }
    if (now + 1u < p.steps) { uniform_number[row] = uniforms[(now + 1u) * p.rows + row]; }
    ids[row] = max(drawn[row], 0);
    positions[row] += 1;
  }
  if (lid == 0u) {
    step[0] = i32(now) + 1;
    cache_len[0] += 1;
  }
}
