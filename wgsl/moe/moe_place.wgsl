// Slots of experts in a cache, of which the least recently used are replaced: operator place_experts.
//   ids, places [n] i32; held, used [slots] i32; counts [3] i32; copies [2 n] i32
// Dispatch: one workgroup of 256.
struct Params { n: u32, slots: u32, experts: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> ids: array<i32>;
@group(0) @binding(2) var<storage, read_write> held: array<i32>;
@group(0) @binding(3) var<storage, read_write> used: array<i32>;
@group(0) @binding(4) var<storage, read_write> counts: array<i32>;
@group(0) @binding(5) var<storage, read_write> places: array<i32>;
@group(0) @binding(6) var<storage, read_write> copies: array<i32>;

const GROUP = 256u;
const IN_SLOT = 0xffffu;  // of `experts`: the slot + 1, or 0
const CHOSEN = 0x10000u;
var<workgroup> experts: array<u32, MOST_EXPERTS>;
var<workgroup> missing: array<u32, MOST_EXPERTS>;  // in order
var<workgroup> last_use: array<i32, MOST_EXPERTS>;  // of each slot; -1: its expert is chosen

fn is_chosen(expert: i32) -> bool { return expert >= 0 && (experts[expert] & CHOSEN) != 0u; }

@compute @workgroup_size(GROUP)
fn main(@builtin(local_invocation_index) lid: u32) {
  let call = counts[0] + 1;
  for (var e = lid; e < p.experts; e += GROUP) {
    var found = 0u;
    for (var i = 0u; i < p.n; i++) { found = select(found, CHOSEN, u32(ids[i]) == e); }
    experts[e] = found;
  }
  workgroupBarrier();
  for (var s = lid; s < p.slots; s += GROUP) {
    let there = held[s];
    last_use[s] = select(used[s], -1, is_chosen(there));
    if (there >= 0) { experts[there] |= s + 1u; }
  }
  workgroupBarrier();
  // Invocation 0 counts all of them, the others those in front of their own.
  var before = 0u;
  var chosen = 0;
  var at = 0u;
  for (var e = lid; e < p.experts; e += GROUP) {
    for (; at < e; at++) { before += u32(experts[at] == CHOSEN); }
    if (experts[e] == CHOSEN) { missing[before] = e; }
  }
  var all = 0u;
  for (var e = 0u; e < p.experts; e++) {
    all += u32(experts[e] == CHOSEN);
    chosen += i32(experts[e] >= CHOSEN);
  }
  for (var i = lid; i < 2u * p.n; i += GROUP) { copies[i] = -1; }
  storageBarrier();
  workgroupBarrier();
  for (var s = lid; s < p.slots; s += GROUP) {
    let own = last_use[s];
    if (own < 0) {
      used[s] = call;
      continue;
    }
    var rank = 0u;
    for (var other = 0u; other < p.slots; other++) {
      let use_of = last_use[other];
      rank += u32(use_of >= 0 && (use_of < own || (use_of == own && other < s)));
    }
    if (rank < all) {
      let taken = missing[rank];
      held[s] = i32(taken);
      used[s] = call;
      experts[taken] |= s + 1u;
      copies[2u * rank] = i32(taken);
      copies[2u * rank + 1u] = i32(s);
    }
  }
  workgroupBarrier();
  for (var i = lid; i < p.n; i += GROUP) { places[i] = i32(experts[ids[i]] & IN_SLOT) - 1; }
  if (lid == 0u) {
    counts[0] = call;
    counts[1] += chosen;
    counts[2] += i32(all);
  }
}
