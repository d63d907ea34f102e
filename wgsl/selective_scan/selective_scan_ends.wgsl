// For each chunk of Mamba-1's recurrence: the state after it without the one before it, and the sum of dt over its
// tokens, -1 if a document begins in the chunk. BACKWARD: the gradient of the state before the chunk without that of the
// state after it; x is the gradient of y then, and each token's flag is written too.
//
// doc_start [batch, tokens] i32; cache_len [1]; totals [chunks, batch, channels] f32: overwritten; states: overwritten,
// in the backward `scratch` of selective_scan_grads.wgsl.
// Dispatch: a workgroup per block of channels of each chunk.
#include "selective_scan.inc.wgsl" scan
#include "selective_scan.inc.wgsl" starts doc=5 cache=6
@group(0) @binding(7) var<storage, read_write> totals: array<f32>;
@group(0) @binding(8) var<storage, read_write> states: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#include "selective_scan.inc.wgsl" begin
  choose(group, lid);
  var state = 0.0;
  var total = 0.0;
  var product = 1.0;
  for (var start = 0u; start < length; start += SPAN) {
    stage(start, lid);
#unroll j SPAN
    {
      let factor = decay($ju);
      total = select(-1.0, total + steps[$ju * BLOCK + place], flags[$j] == 2u && total >= 0.0);
#if BACKWARD
      product *= factor;
      state += product * out_of[$ju * WIDE + number] * inputs[$ju * BLOCK + place];
#else
      state = factor * state + added($ju) * into[$ju * WIDE + number];
#endif
    }
#end
  }
  let slot = chunk * p.batch * p.channels * p.numbers;
  if (is_state()) { states[slot + state_place()] = state; }
  if (number == 0u && block * BLOCK + place < p.channels) {
    totals[(chunk * p.batch + b) * p.channels + block * BLOCK + place] = total;
  }
#if BACKWARD
  if (block == 0u && lid < count) { states[p.flags_at + (b * p.chunks + chunk) * CHUNK + lid] = f32(flag(lid)); }
#endif
}
