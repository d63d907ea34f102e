// Part of attention.wgsl and attention_decode.wgsl: parameters, arrays, and how their rows are read and written.
struct Params {
  batch: u32, queries: u32, keys: u32, heads: u32,
  kv_heads: u32, query_tiles: u32, splits: u32, window: u32,
  scale: f32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> q: array<Q_T>;
@group(0) @binding(2) var<storage, read> k: array<K_T>;
@group(0) @binding(3) var<storage, read> v: array<V_T>;
@group(0) @binding(4) var<storage, read> doc_start: array<i32>;
@group(0) @binding(5) var<storage, read> cache_len: array<i32>;
@group(0) @binding(6) var<storage, read_write> o: array<O_T>;
@group(0) @binding(7) var<storage, read_write> lse: array<f32>;

const MASKED: f32 = -1e30;
const FLOOR: f32 = -1e20;  // least row maximum: exp2(MASKED - FLOOR) is 0, also in a row that sees no key of a tile
const LN2: f32 = 0.6931471805599453;

#include "attention_common.wgsl"
#include "attention_load.wgsl" x=q
#include "attention_load.wgsl" x=k
#include "attention_load.wgsl" x=v
#include "attention_store.wgsl" y=o type=O_T
