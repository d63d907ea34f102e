// Part of attention_backward_dq.wgsl and attention_matrix_dq.wgsl: parameters and arrays.
struct Params {
  batch: u32, queries: u32, heads: u32, kv_heads: u32,
  query_tiles: u32, splits: u32, window: u32, scale: f32,
}
@group(0) @binding(0) var<uniform> p: Params;
#include "attention_backward_bindings.wgsl"
@group(0) @binding(7) var<storage, read_write> dq: array<DQ_T>;
