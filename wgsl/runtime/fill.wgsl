// out[i] = word, as 32-bit words. If only some bytes of the last word belong to the array (tail_mask != 0), the others
// are kept, because they may belong to another view.
//   out [words] u32. Dispatch: ceil(words / 1024) workgroups (folded), 4 words per invocation.
struct Params { words: u32, word: u32, tail_mask: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> out: array<u32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let base = (wg.x + wg.y * nwg.x) * 1024u + lid;
  for (var i = 0u; i < 4u; i++) {
    let at = base + i * 256u;
    if (at + 1u == p.words && p.tail_mask != 0u) {
      out[at] = (p.word & p.tail_mask) | (out[at] & ~p.tail_mask);
    } else if (at < p.words) {
      out[at] = p.word;
    }
  }
}
