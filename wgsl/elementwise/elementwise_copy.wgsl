// out = src, as 32-bit words (elements of 4 words where the size allows).
//   src, out [n] W_T: u32 or vec4<u32>. If only some bytes of the last word belong to the arrays (tail_mask != 0), the
//   others are kept, because they may belong to another view.
// Dispatch: ceil(n / 1024) workgroups (folded), 4 elements per invocation, 256 apart.
struct Params { n: u32, tail_mask: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> src: array<W_T>;
@group(0) @binding(2) var<storage, read_write> out: array<W_T>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let base = (wg.x + wg.y * nwg.x) * 1024u + lid;
#unroll i 4
  let at$i = min(base + $i * 256u, p.n - 1u);
  var v$i = src[at$i];
#end
#unroll i 4
  if (base + $i * 256u < p.n) {
    if (p.tail_mask != 0u && at$i == p.n - 1u) {
      v$i = (v$i & W_T(p.tail_mask)) | (out[at$i] & W_T(~p.tail_mask));
    }
    out[at$i] = v$i;
  }
#end
}
