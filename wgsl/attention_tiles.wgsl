// Part of the tiled attention kernels: scores on their way to become the left operand of a product, and whole rows, VN
// of them, which are its right one.
const THREADS: u32 = TX * TY;

// One vec4 of padding a row puts neighbouring rows in different banks.
struct ScoreRow { at: array<array<vec4<f32>, VN4>, NV>, pad: vec4<f32> }
var<workgroup> p_tile: array<array<ScoreRow, TY>, RM>;
var<workgroup> row_tile: array<array<array<vec4<f32>, TX>, RD>, VN>;

fn put_rows(x: array<vec4<f32>, LOADS_FLAT>, lid: u32) {
#unroll n LOADS_FLAT
  {
    let at = lid + $nu * THREADS;
    let row = at / (RD * TX);
    let c = at % (RD * TX);
    if (at < VN * RD * TX) { row_tile[row][c / TX][c % TX] = x[$n]; }
  }
#end
}
