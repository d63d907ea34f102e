// Part of every kernel of attention's backward: what it reads.
@group(0) @binding(1) var<storage, read> dy: array<DO_T>;
@group(0) @binding(2) var<storage, read> q: array<Q_T>;
@group(0) @binding(3) var<storage, read> k: array<K_T>;
@group(0) @binding(4) var<storage, read> v: array<V_T>;
@group(0) @binding(5) var<storage, read> stats: array<vec2<f32>>;
@group(0) @binding(6) var<storage, read> doc_start: array<i32>;

#include "attention_common.wgsl"
