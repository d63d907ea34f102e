// Squared ReLU: y = max(x, 0)^2, and with BACKWARD dx = 2 max(x, 0) dy.
//   x, dy, y [n]: f32. Dispatch: ceil(n / 256) workgroups, which may be folded into two dimensions.
struct Params { n: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;
#if BACKWARD
@group(0) @binding(2) var<storage, read> dy: array<f32>;
#endif
@group(0) @binding(3) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let i = (wg.x + wg.y * nwg.x) * 256u + lid;
  if (i < p.n) {
    let positive = max(x[i], 0.0);
#if BACKWARD
    y[i] = 2.0 * positive * dy[i];
#else
    y[i] = positive * positive;
#endif
  }
}
