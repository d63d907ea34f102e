// stats[b, h, t] = (lse[b, h, t] log2(e), sum_d do[b, t, h, d] o[b, t, h, d]), for the attention backward.
//
//   do o [B, T, H, D] float32 or float16, lse [B, H, T] f32 -> stats [B, H, T] vec2 f32
//
// Dispatch: ceil(B T H / ROWS) workgroups (folded) of ROWS = 256 / LANES rows, LANES invocations per row.
struct Params { batch: u32, queries: u32, heads: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> dy: array<DO_T>;
@group(0) @binding(2) var<storage, read> o: array<O_T>;
@group(0) @binding(3) var<storage, read> lse: array<f32>;
@group(0) @binding(4) var<storage, read_write> stats: array<vec2<f32>>;

const ROWS: u32 = 256u / LANES;
const LOG2E: f32 = 1.4426950408889634;
var<workgroup> parts: array<array<f32, LANES>, ROWS>;

@compute @workgroup_size(256)
fn main(
  @builtin(workgroup_id) wg: vec3<u32>,
  @builtin(num_workgroups) nwg: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
) {
  let first = (wg.x + wg.y * nwg.x) * ROWS;
  let row = first + lid / LANES;  // (b T + t) H + h
  let rows = p.batch * p.queries * p.heads;
  var sum = 0.0;
  if (row < rows) {
#if VEC
#unroll n STEPS
    {
      let c = lid % LANES + $nu * LANES;
      if (c < W4) { sum += dot(vec4<f32>(dy[row * W4 + c]), vec4<f32>(o[row * W4 + c])); }
    }
#end
#else
    for (var c = lid % LANES; c < WIDTH; c += LANES) { sum += f32(dy[row * WIDTH + c]) * f32(o[row * WIDTH + c]); }
#endif
  }
  parts[lid / LANES][lid % LANES] = sum;
  workgroupBarrier();
  let mine = first + lid;
  if (lid < ROWS && mine < rows) {
    var total = 0.0;
    for (var i = 0u; i < LANES; i++) { total += parts[lid][i]; }
    let t = mine / p.heads % p.queries;
    let at = (mine / p.heads / p.queries * p.heads + mine % p.heads) * p.queries + t;
    stats[at] = vec2<f32>(lse[at] * LOG2E, total);
  }
}
