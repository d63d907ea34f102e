// `count` numbers from one array to another, from and to any place: to[into + n] = from_[at + n].
//
// from_, to f32. Dispatch: a workgroup for every 256 of them.
struct Params { count: u32, at: u32, into: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> from_: array<f32>;
@group(0) @binding(2) var<storage, read_write> to: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) gid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>) {
  let n = gid.x + gid.y * nwg.x * 256u;
  if (n < p.count) { to[p.into + n] = from_[p.at + n]; }
}
