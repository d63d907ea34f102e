// Which experts stay in slots if any number of them has rows: operator keep_experts.
//   start [experts + 1] i32; held, used [slots] i32; counts [3] i32; origins [experts] vec2<i32>
// Dispatch: one workgroup of 256.
struct Params { experts: u32, slots: u32, counted: i32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> start: array<i32>;
@group(0) @binding(2) var<storage, read_write> held: array<i32>;
@group(0) @binding(3) var<storage, read_write> used: array<i32>;
@group(0) @binding(4) var<storage, read_write> counts: array<i32>;
@group(0) @binding(5) var<storage, read_write> origins: array<vec2<i32>>;

const GROUP = 256u;
const NONE = -1;
const ENTERS = -2;
var<workgroup> rows: array<i32, MOST_EXPERTS>;
var<workgroup> last: array<i32, MOST_EXPERTS>;  // the call that used an expert in a slot, + 1; 0 of others
var<workgroup> place: array<i32, MOST_EXPERTS>;  // an expert's slot, NONE or ENTERS
var<workgroup> entering: array<u32, MOST_EXPERTS>;  // in order

// Whether the expert in a slot does not stay there.
fn is_free(slot: u32) -> bool { return held[slot] < 0 || place[held[slot]] != i32(slot); }

@compute @workgroup_size(GROUP)
fn main(@builtin(local_invocation_index) lid: u32) {
  let call = counts[0] + 1;
  for (var e = lid; e < p.experts; e += GROUP) {
    rows[e] = start[e + 1u] - start[e];
    last[e] = 0;
    place[e] = NONE;
  }
  workgroupBarrier();
  for (var s = lid; s < p.slots; s += GROUP) {
    if (held[s] >= 0) {
      last[held[s]] = used[s] + 1;
      place[held[s]] = i32(s);
    }
  }
  workgroupBarrier();
  for (var e = lid; e < p.experts; e += GROUP) {
    var rank = 0u;
    for (var o = 0u; o < p.experts; o++) {
      let later = last[o] > last[e] || (last[o] == last[e] && o < e);
      rank += u32(rows[o] > rows[e] || (rows[o] == rows[e] && later));
    }
    if (rank >= p.slots) {
      place[e] = NONE;
    } else if (rows[e] > 0 && place[e] == NONE) {
      place[e] = ENTERS;
    }
  }
  workgroupBarrier();
  // Invocation 0 counts all of them, the others those in front of their own.
  var enter = 0u;
  var needed = 0;
  var missing = 0;
  for (var e = 0u; e < p.experts; e++) {
    if (place[e] == ENTERS) {
      if (e % GROUP == lid) { entering[enter] = e; }
      enter++;
    }
    needed += i32(rows[e] > 0);
    missing += i32(rows[e] > 0 && last[e] == 0);
  }
  for (var e = lid; e < p.experts; e += GROUP) {
    origins[e] = vec2(select(-2, max(place[e], NONE), rows[e] > 0), -1);
  }
  storageBarrier();
  workgroupBarrier();
  // From here on, `last` has the expert that a slot gets, or NONE.
  for (var s = lid; s < p.slots; s += GROUP) {
    var before = 0u;
    for (var o = 0u; o < s; o++) { before += u32(is_free(o)); }
    last[s] = NONE;
    if (is_free(s) && before < enter) { last[s] = i32(entering[before]); }
  }
  storageBarrier();  // all have read `held`
  for (var s = lid; s < p.slots; s += GROUP) {
    if (last[s] >= 0) {
      held[s] = last[s];
      origins[last[s]].y = i32(s);
    }
    if (held[s] >= 0 && rows[held[s]] > 0) { used[s] = call; }
  }
  if (lid == 0u) {
    counts[0] = call;
    counts[1] += needed * p.counted;
    counts[2] += missing * p.counted;
  }
}
