// Mamba-1's output y of a chunk, from the state before it: h = exp(rate dt) h + dt x B, y = C' h + skip x.
//
// doc_start [batch, tokens] i32; cache_len [1]; states: before each chunk, with STATEFUL of the only chunk, overwritten
// with the one after it; y [batch, tokens, channels] X_T: overwritten.
// Dispatch: a workgroup per block of channels of each chunk.
#include "selective_scan.inc.wgsl" scan
#include "selective_scan.inc.wgsl" starts doc=5 cache=6
#include "selective_scan.inc.wgsl" channel_sum
@group(0) @binding(7) var<storage, read_write> states: array<f32>;
@group(0) @binding(8) var<storage, read_write> y: array<X_T>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#include "selective_scan.inc.wgsl" begin
  choose(group, lid);
  var state = 0.0;
  let slot = (p.at + chunk) * p.batch * p.channels * p.numbers + state_place();
  if (is_state()) { state = states[slot]; }
  let channel = block * BLOCK + lid % BLOCK;
  for (var start = 0u; start < length; start += SPAN) {
    stage(start, lid);
#unroll j SPAN
    state = decay($ju) * state + added($ju) * into[$ju * WIDE + number];
    terms[$ju * 256u + lid] = out_of[$ju * WIDE + number] * state;
#end
    workgroupBarrier();
    let t = start + lid / BLOCK;
    if (lid < SLOTS && t < count && channel < p.channels) {
      y[(row + t) * p.channels + channel] = X_T(channel_sum(lid) + weight_of(channel, p.numbers) * inputs[lid]);
    }
  }
#if STATEFUL
  if (is_state()) { states[slot] = state; }
#endif
}
