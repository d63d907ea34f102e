// Gradients of Mamba-1's recurrence in a chunk, from the state before it and the gradient of the one after it.
//
// states: before each chunk; dy [batch, tokens, channels] DY_T; dxdt X_T: the gradients of x and of dt, the second from
// p.second on, overwritten for the tokens of the segment.
// scratch f32 has the gradients of the states after each chunk of the segment [chunks, batch, channels, numbers]; at
// p.sums_at parts of weight's gradient, to which it adds [batch, chunks, channels, numbers + 2]; at p.parts_at, of each
// group of blocks of channels, its part of bc's gradient [groups, batch, chunks CHUNK, 2 numbers]; at p.flags_at each
// token's flag (selective_scan_ends.wgsl).
// Dispatch: a workgroup per group of p.rounds blocks of channels of each chunk.
#include "selective_scan.inc.wgsl" scan
#include "selective_scan.inc.wgsl" channel_sum
@group(0) @binding(5) var<storage, read> states: array<f32>;
@group(0) @binding(6) var<storage, read> dy: array<DY_T>;
@group(0) @binding(7) var<storage, read_write> scratch: array<f32>;
@group(0) @binding(8) var<storage, read_write> dxdt: array<X_T>;

var<workgroup> upstream: array<f32, SLOTS>;

fn flag(t: u32) -> u32 { return u32(scratch[p.flags_at + (b * p.chunks + chunk) * CHUNK + t]); }
// Read the gradients of y where `stage` reads x.
fn stage_upstream(start: u32, lid: u32) {
  let channel = block * BLOCK + lid % BLOCK;
  let t = start + lid / BLOCK;
  if (lid < SLOTS) {
    upstream[lid] = 0.0;
    if (t < count && channel < p.channels) { upstream[lid] = f32(dy[(row + t) * p.channels + channel]); }
  }
  workgroupBarrier();
}
// Write the sums over the block's channels of `terms` to the part of B's gradient (`which` 0) or C's (1).
fn write_part(which: u32, start: u32, group: u32, added: bool, lid: u32) {
  workgroupBarrier();
  for (var n = lid; n < SPAN * WIDE; n += 256u) {
    let t = start + n / WIDE;
    if (t < count && n % WIDE < p.numbers) {
      var sum = 0.0;
      for (var k = 0u; k < BLOCK; k++) { sum += terms[n / WIDE * 256u + k * WIDE + n % WIDE]; }
      let token = ((group * p.batch + b) * p.chunks + chunk) * CHUNK + t;
      let e = p.parts_at + (token * 2u + which) * p.numbers + n % WIDE;
      scratch[e] = sum + select(0.0, scratch[e], added);
    }
  }
  workgroupBarrier();
}
fn write_sum(channel: u32, column: u32, sum: f32) {
  let e = p.sums_at + ((b * p.chunks + chunk) * p.channels + channel) * (p.numbers + 2u) + column;
  scratch[e] += sum;
}
// Write the sum over the tokens of a span of what the invocations of a channel have.
fn write_sum_of_tokens(column: u32, own: f32, lid: u32) {
  workgroupBarrier();
  terms[lid] = own;
  workgroupBarrier();
  let channel = block * BLOCK + lid;
  if (lid < BLOCK && channel < p.channels) {
    var sum = 0.0;
    for (var j = 0u; j < SPAN; j++) { sum += terms[j * BLOCK + lid]; }
    write_sum(channel, column, sum);
  }
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#include "selective_scan.inc.wgsl" begin
  let size = p.batch * p.channels * p.numbers;
  var marks: array<f32, SPANS>;  // the state before each span
  for (var turn = 0u; turn < p.rounds && group * p.rounds + turn < p.blocks; turn++) {
    choose(group * p.rounds + turn, lid);
    var state = 0.0;
    var upper = 0.0;  // the gradient of the state
    if (is_state()) {
      state = states[(p.at + chunk) * size + state_place()];
      upper = scratch[chunk * size + state_place()];
    }
    for (var start = 0u; start < length; start += SPAN) {
      marks[start / SPAN] = state;
      stage(start, lid);
#unroll j SPAN
      state = decay($ju) * state + added($ju) * into[$ju * WIDE + number];
#end
    }
    var of_rate = 0.0;
    var of_skip = 0.0;
    var of_bias = 0.0;
    let channel = block * BLOCK + lid % BLOCK;
    for (var n = (length + SPAN - 1u) / SPAN; n > 0u; n--) {
      let start = (n - 1u) * SPAN;
      stage(start, lid);
      stage_upstream(start, lid);
      var reached: array<f32, 9>;  // the states before and after each token
      var factors: array<f32, 8>;
      reached[0] = marks[n - 1u];
#unroll j SPAN
      factors[$j] = decay($ju);
      reached[$j + 1] = factors[$j] * reached[$j] + added($ju) * into[$ju * WIDE + number];
#end
      // Terms of the gradients of dt x and of dt, summed over the states of a channel, and of B and C, summed over channels.
      var by_input: array<f32, 8>;
      var by_decay: array<f32, 8>;
      var by_into: array<f32, 8>;
#unroll j SPAN
      upper += out_of[(7u - $ju) * WIDE + number] * upstream[(7u - $ju) * BLOCK + place];
      by_input[7 - $j] = select(0.0, upper * into[(7u - $ju) * WIDE + number], flags[7 - $j] > 0u);
      by_into[7 - $j] = upper * added(7u - $ju);
      upper *= factors[7 - $j];
      by_decay[7 - $j] = upper * reached[7 - $j] * rate;
      of_rate += by_decay[7 - $j] * steps[(7u - $ju) * BLOCK + place];
#end
#unroll j SPAN
      terms[$ju * 256u + lid] = by_input[$j];
#end
      workgroupBarrier();
      var to_input = 0.0;
      if (lid < SLOTS) { to_input = channel_sum(lid); }
      workgroupBarrier();
#unroll j SPAN
      terms[$ju * 256u + lid] = by_decay[$j];
#end
      workgroupBarrier();
      let t = start + lid / BLOCK;
      if (lid < SLOTS && t < count && channel < p.channels) {
        let e = (row + t) * p.channels + channel;
        let direct = weight_of(channel, p.numbers) * upstream[lid];
        dxdt[e] = X_T(steps[lid] * to_input + direct);
        let z = f32(dt[e]) + weight_of(channel, p.numbers + 1u);
        let of_dt = (inputs[lid] * to_input + channel_sum(lid)) / (1.0 + exp(min(-z, 87.0)));
        dxdt[p.second + e] = X_T(of_dt);
        of_skip += upstream[lid] * inputs[lid];
        of_bias += of_dt;
      }
      workgroupBarrier();
#unroll j SPAN
      terms[$ju * 256u + lid] = by_into[$j];
#end
      write_part(0u, start, group, turn > 0u, lid);
#unroll j SPAN
      terms[$ju * 256u + lid] = select(0.0, upstream[$ju * BLOCK + place] * reached[$j + 1], is_state());
#end
      write_part(1u, start, group, turn > 0u, lid);
    }
#if WEIGHT
    if (is_state()) { write_sum(block * BLOCK + place, number, of_rate); }
    write_sum_of_tokens(p.numbers, of_skip, lid);
    write_sum_of_tokens(p.numbers + 1u, of_bias, lid);
#endif
  }
}
