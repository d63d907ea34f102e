// Part of attention_backward_dkv.wgsl and attention_matrix_dkv.wgsl: parameters and arrays.
struct Params {
  batch: u32, queries: u32, heads: u32, kv_heads: u32,
  key_tiles: u32, head_splits: u32, query_splits: u32, window: u32,
  scale: f32,
}
@group(0) @binding(0) var<uniform> p: Params;
#include "attention_backward_bindings.wgsl"
@group(0) @binding(7) var<storage, read_write> dk: array<DK_T>;
@group(0) @binding(8) var<storage, read_write> dv: array<DV_T>;

const NEVER: u32 = 0xffffffffu;  // the first key seen by a query beyond the last
