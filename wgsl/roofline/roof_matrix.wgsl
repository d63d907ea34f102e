// Peak rate of tensor cores: 8 sums of 16 x 16 per subgroup, C_ij += A_i B_j from registers, `passes` times.
//   out [workgroups, SGS, 16, 16] f32: the sum of a subgroup's 8.
// A_i and B_j are 16 x 16 parts of one array in workgroup memory, whose element n is (n % 13) / 16.
// Dispatch: any number of workgroups of SGS subgroups. Needs: subgroups of LANES.
enable f16;
enable wgpu_cooperative_matrix;

struct Params { passes: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> out: array<vec4<f32>>;

const THREADS: u32 = $LANESu * SGS;
const FACTORS: u32 = 6u * 64u;  // vec4 of two A and four B

var<workgroup> factors: array<vec4<f16>, FACTORS>;
var<workgroup> sums: array<vec4<f32>, SGS * 64u>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  for (var i = lid; i < FACTORS; i += THREADS) {
    let n = vec4<u32>(4u * i) + vec4<u32>(0u, 1u, 2u, 3u);
    factors[i] = vec4<f16>(vec4<f32>(n % vec4<u32>(13u)) / 16.0);
  }
  workgroupBarrier();
  let ld = 4u;
#unroll i 2
  let a_at_$i = 64u * $iu;
  let a_$i = coopLoadT<coop_mat16x16<f16, A>>(&factors[a_at_$i], ld);
#end
#unroll j 4
  let b_at_$j = 64u * (2u + $ju);
  let b_$j = coopLoadT<coop_mat16x16<f16, B>>(&factors[b_at_$j], ld);
#end
#unroll i 2
#unroll j 4
  var acc_$i_$j = coop_mat16x16<f32, C>();
#end
#end
  for (var n = 0u; n < p.passes; n++) {
#unroll i 2
#unroll j 4
    acc_$i_$j = coopMultiplyAdd(a_$i, b_$j, acc_$i_$j);
#end
#end
  }
  // A cooperative matrix cannot be indexed: they pass through workgroup memory one by one.
  let sum_at = (lid / $LANESu) * 64u;
  let mine = sum_at + (lid % $LANESu) * $FOURSu;
#unroll v FOURS
  var total_$v = vec4<f32>();
#end
#unroll i 2
#unroll j 4
  coopStoreT(acc_$i_$j, &sums[sum_at], ld);
  workgroupBarrier();
#unroll v FOURS
  total_$v += sums[mine + $vu];
#end
  workgroupBarrier();
#end
#end
  let first = wg.x * SGS * 64u + mine;
#unroll v FOURS
  out[first + $vu] = total_$v;
#end
}
