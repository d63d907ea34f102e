// The gradient of Mamba-1's B and C: the sum over groups of channels of what selective_scan_grads.wgsl wrote.
//
// parts [groups, batch, here, 2 numbers] f32 of `here` tokens from `at` on; dbc [batch, tokens, 2 numbers] X_T:
// overwritten for those tokens.
// Dispatch: a workgroup per 256 numbers of a group.
struct Params { batch: u32, tokens: u32, width: u32, at: u32, here: u32, groups: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> parts: array<f32>;
@group(0) @binding(2) var<storage, read_write> dbc: array<X_T>;

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) gid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>) {
  let place = gid.x + gid.y * nwg.x * 256u;
  let size = p.batch * p.here * p.width;
  let t = p.at + place / p.width % p.here;
  if (place >= size || t >= p.tokens) { return; }
  var sum = 0.0;
  for (var group = 0u; group < p.groups; group++) { sum += parts[group * size + place]; }
  dbc[(place / p.width / p.here * p.tokens + t) * p.width + place % p.width] = X_T(sum);
}
