// Part of attention_backward_dq.wgsl and attention_backward_dkv.wgsl: what they read, and how.
#include "attention_backward_bindings.wgsl"
#include "attention_load.wgsl" x=q
#include "attention_load.wgsl" x=dy
#include "attention_load.wgsl" x=k
#include "attention_load.wgsl" x=v
#include "attention_tiles.wgsl"
