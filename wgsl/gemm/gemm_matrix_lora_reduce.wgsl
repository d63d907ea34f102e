// Second pass of gemm_matrix_lora.wgsl: du [rows, parts rank] = alpha * sum over the shares of each part, and
// db [columns, rank] = sum over row blocks (+ db where ACCUMULATE), in a fixed order.
// Dispatch: ceil((rows parts rank + columns rank) / 4 / 256) workgroups (folded), four elements per invocation, of du and
// then of db.
struct Params {
  rows: u32, columns: u32, rank: u32, ld_u: u32,
  share_1: u32, share_2: u32, shares: u32, row_blocks: u32, alpha: f32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> of_shares: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> of_blocks: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> du: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> db: array<vec4<f32>>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let i = (wg.x + wg.y * nwg.x) * 256u + lid;
  let fours = p.rank / 4u;
  let of_u = p.rows * p.ld_u / 4u;
  if (i < of_u) {
    let row = i * 4u / p.ld_u;
    let r = i - row * p.ld_u / 4u;  // of all parts
    let part = r / fours;
    let first = select(select(0u, p.share_1, part > 0u), p.share_2, part > 1u);
    let end = select(select(p.share_1, p.share_2, part > 0u), p.shares, part > 1u);
    var sum = vec4<f32>();
    for (var share = first; share < end; share++) { sum += of_shares[(share * p.rows + row) * fours + r % fours]; }
    du[i] = p.alpha * sum;
    return;
  }
  let at = i - of_u;
  let per_block = p.columns * fours;
  if (at >= per_block) { return; }
  var sum = of_blocks[at];
  for (var block = 1u; block < p.row_blocks; block++) { sum += of_blocks[block * per_block + at]; }
#if ACCUMULATE
  sum += db[at];
#endif
  db[at] = sum;
}
