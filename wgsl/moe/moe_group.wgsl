// Sort slots by expert: a stable counting sort, without atomics.
//   ids [slots] i32; start [experts + 1] i32; order, place [slots] i32
//   counts [chunks, experts] u32: each expert's slots in each chunk of 256; `scan` turns them into the expert's slots
//       in earlier chunks
// Dispatch: count and scatter: a workgroup of 256 per chunk (folded); scan: one workgroup.
struct Params { slots: u32, experts: u32, chunks: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> ids: array<i32>;
@group(0) @binding(2) var<storage, read_write> counts: array<u32>;
@group(0) @binding(3) var<storage, read_write> start: array<i32>;
@group(0) @binding(4) var<storage, read_write> order: array<i32>;
@group(0) @binding(5) var<storage, read_write> place: array<i32>;

const GROUP = 256u;
var<workgroup> own: array<u32, GROUP>;
var<workgroup> totals: array<u32, MOST_EXPERTS>;

// The expert of a slot, clamped to valid ones; p.experts beyond the last slot.
fn expert_of(slot: u32) -> u32 {
  if (slot >= p.slots) { return p.experts; }
  return min(u32(max(ids[slot], 0)), p.experts - 1u);
}

@compute @workgroup_size(GROUP)
fn count(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let chunk = wg.x + wg.y * nwg.x;
  own[lid] = expert_of(chunk * GROUP + lid);
  workgroupBarrier();
  if (chunk >= p.chunks) { return; }
  for (var e = lid; e < p.experts; e += GROUP) {
    var found = 0u;
    for (var i = 0u; i < GROUP; i++) { found += u32(own[i] == e); }
    counts[chunk * p.experts + e] = found;
  }
}

@compute @workgroup_size(GROUP)
fn scan(@builtin(local_invocation_index) lid: u32) {
  for (var e = lid; e < p.experts; e += GROUP) {
    var before = 0u;
    for (var chunk = 0u; chunk < p.chunks; chunk++) {
      let at = chunk * p.experts + e;
      let found = counts[at];
      counts[at] = before;
      before += found;
    }
    totals[e] = before;
  }
  workgroupBarrier();
  for (var e = lid; e <= p.experts; e += GROUP) {
    var before = 0u;
    for (var i = 0u; i < e; i++) { before += totals[i]; }
    start[e] = i32(before);
  }
}

@compute @workgroup_size(GROUP)
fn scatter(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let chunk = wg.x + wg.y * nwg.x;
  let slot = chunk * GROUP + lid;
  let expert = expert_of(slot);
  own[lid] = expert;
  workgroupBarrier();
  if (chunk >= p.chunks || slot >= p.slots) { return; }
  var before = 0u;
  for (var i = 0u; i < lid; i++) { before += u32(own[i] == expert); }
  let row = u32(start[expert]) + counts[chunk * p.experts + expert] + before;
  order[row] = i32(slot);
  place[slot] = i32(row);
}
