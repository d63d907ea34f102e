// From chunk to chunk of Mamba-1's recurrence: replace what each chunk adds to the state by the state before the chunk.
// BACKWARD, from the last chunk to the first: by the gradient of the state after the chunk.
//
// weight [channels, numbers + 2] f32; totals [chunks, batch, channels] f32 (selective_scan_ends.wgsl); states [chunks,
// batch, channels, numbers] f32; carry [batch, channels, numbers] f32: the state before the first chunk, overwritten
// with the one after the last.
// Dispatch: a workgroup per 256 numbers of carry.
struct Params { batch: u32, channels: u32, numbers: u32, chunks: u32, first: u32, end: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> weight: array<f32>;
@group(0) @binding(2) var<storage, read> totals: array<f32>;
@group(0) @binding(3) var<storage, read_write> states: array<f32>;
@group(0) @binding(4) var<storage, read_write> carry: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let group = p.first + wg.x + wg.y * nwg.x;
  let size = p.batch * p.channels * p.numbers;
  let place = group * 256u + lid;
  if (group >= p.end || place >= size) { return; }
  let row = place / p.numbers;
  let rate = -exp(weight[row % p.channels * (p.numbers + 2u) + place % p.numbers]);
  var state = carry[place];
  for (var n = 0u; n < p.chunks; n++) {
#if BACKWARD
    let chunk = p.chunks - 1u - n;
#else
    let chunk = n;
#endif
    let total = totals[chunk * p.batch * p.channels + row];
    let own = states[chunk * size + place];
    states[chunk * size + place] = state;
    state = select(0.0, exp(rate * total), total >= 0.0) * state + own;
  }
  carry[place] = state;
}
