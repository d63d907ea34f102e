// Copy `columns` numbers of each of `rows` rows between arrays whose rows may differ in length:
// to[into + r to_row + c] = from_[at + r from_row + c].
//
// from_, to f32. Dispatch: a workgroup per 256 numbers (folded).
struct Params { rows: u32, columns: u32, from_row: u32, at: u32, to_row: u32, into: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> from_: array<f32>;
@group(0) @binding(2) var<storage, read_write> to: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) gid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>) {
  let n = gid.x + gid.y * nwg.x * 256u;
  let r = n / p.columns;
  if (r < p.rows) { to[p.into + r * p.to_row + n % p.columns] = from_[p.at + r * p.from_row + n % p.columns]; }
}
