// Part of attention_matrix*.wgsl: the workgroup memory that they all use. A subgroup has 16 of the BM rows.
const BM: u32 = 16u * SG;
const W8: u32 = WIDTH / 8u;
// Lengths of rows, in eights and in vec4, padded so that neighbouring rows start in different banks.
const TILE_LD: u32 = W8 + 1u;
const S_LD: u32 = BN / 4u + 2u;
const LEFT_W8: u32 = W8 / LEFT_PARTS;

var<workgroup> tile: array<Eight, TILE>;  // BN rows of an array, then BN of another; before, the left operands
var<workgroup> strips: array<vec4<f32>, BM * S_LD>;  // what cooperative matrices hold, on its way to invocations and back
