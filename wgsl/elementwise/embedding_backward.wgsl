// dtable[v] = sum of dy[i] over the tokens i with ids[i] = v, for v in the window [first, last), which must be zero
// before. Deterministic, without atomics or a sort: `link` chains the tokens of one id in rising order, and in `main`
// the first token of each chain sums the chain.
//   ids [N] i32; links [N] u32: the next token with this id (N: none), with the top bit set if no earlier one has it;
//   dy [N, columns] DY_T: f32 or f16, or vec4 of it where columns is a multiple of 4; dtable [last - first, columns]
//   C_T.
// Dispatch: link: ceil(N / 256) workgroups, from token `first` on; each invocation searches both ways for its id (at
// worst N^2 comparisons in all). main: ceil(N * columns / 256) workgroups (folded).
struct Params { n: u32, columns: u32, first: u32, last: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> ids: array<i32>;
@group(0) @binding(2) var<storage, read_write> links: array<u32>;
@group(0) @binding(3) var<storage, read> dy: array<DY_T>;
@group(0) @binding(4) var<storage, read_write> dtable: array<C_T>;

const FIRST = 0x80000000u;

@compute @workgroup_size(256)
fn link(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let token = p.first + (wg.x + wg.y * nwg.x) * 256u + lid;
  if (token >= p.n) { return; }
  let id = ids[token];
  var before = token;
  while (before > 0u && ids[before - 1u] != id) { before--; }
  var after = token + 1u;
  while (after < p.n && ids[min(after, p.n - 1u)] != id) { after++; }
  links[token] = after | select(0u, FIRST, before == 0u);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let item = (wg.x + wg.y * nwg.x) * 256u + lid;
  if (item >= p.n * p.columns) { return; }
  let token = item / p.columns;
  let column = item % p.columns;
  let link = links[token];
  let id = u32(ids[token]);
  if ((link & FIRST) == 0u || id < p.first || id >= p.last) { return; }
  var sum = C_T(dy[item]);
  for (var next = link & ~FIRST; next < p.n; next = links[next]) { sum += C_T(dy[next * p.columns + column]); }
  dtable[(id - p.first) * p.columns + column] = sum;
}
