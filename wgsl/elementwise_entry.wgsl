// An entry point of elementwise.wgsl: y = $value of a$i, elements of $first, and b$i, which is $second.
// Dispatch: as there; loads are clamped to the last element, stores are guarded.
@compute @workgroup_size(256)
fn $name(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let base = (wg.x + wg.y * nwg.x) * 1024u + lid;
#unroll i 4
  let at$i = min(base + $i * 256u, p.n - 1u);
  let a$i = C_T($first[at$i]);
  let b$i = $second;
#end
#unroll i 4
  if (base + $i * 256u < p.n) { y[at$i] = Y_T($value); }
#end
}
