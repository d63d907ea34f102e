// dtable[v] = sum of dy[i] over the tokens i with ids[i] = v, for v in the window [first, last); the rest of the window
// must be zero before. Deterministic and without atomics on floats: the first token of each id adds up all of its
// kind, in rising order.
//   dy [N, columns] DY_T: f32 or f16, vec4 of it where columns divide by 4; ids [N] i32; dtable [last - first, columns] C_T.
// Dispatch: (N, ceil(columns / 256)) as (x folded into x and y, z). Quadratic in N, with a small constant: a workgroup
// compares 256 ids at a time, and stops at once where an earlier token has its id.
struct Params { n: u32, columns: u32, first: u32, last: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> dy: array<DY_T>;
@group(0) @binding(2) var<storage, read> ids: array<i32>;
@group(0) @binding(3) var<storage, read_write> dtable: array<C_T>;

var<workgroup> earlier: atomic<u32>;
var<workgroup> found: array<atomic<u32>, 8>;  // bit per id of the current 256

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let token = wg.x + wg.y * nwg.x;
  if (token >= p.n) { return; }
  let id = ids[token];
  if (u32(id) < p.first || u32(id) >= p.last) { return; }
  if (lid == 0u) { atomicStore(&earlier, 0u); }  // wgpu-native does not zero workgroup memory
  workgroupBarrier();
  var same = false;
  for (var i = lid; i < token && !same; i += 256u) { same = ids[i] == id; }
  if (same) { atomicStore(&earlier, 1u); }
  workgroupBarrier();
  if (atomicLoad(&earlier) != 0u) { return; }

  let column = wg.z * 256u + lid;
  let c = min(column, p.columns - 1u);
  var sum = C_T(0.0);
  for (var start = token; start < p.n; start += 256u) {
    if (lid < 8u) { atomicStore(&found[lid], 0u); }
    workgroupBarrier();
    if (start + lid < p.n && ids[min(start + lid, p.n - 1u)] == id) { atomicOr(&found[lid / 32u], 1u << (lid % 32u)); }
    workgroupBarrier();
    for (var word = 0u; word < 8u; word++) {
      var bits = atomicLoad(&found[word]);
      while (bits != 0u) {
        let bit = firstTrailingBit(bits);
        bits &= bits - 1u;
        sum += C_T(dy[(start + word * 32u + bit) * p.columns + c]);
      }
    }
    workgroupBarrier();
  }
  if (column < p.columns) { dtable[(u32(id) - p.first) * p.columns + column] = sum; }
}
