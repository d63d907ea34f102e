// Part of attention_backward_dq.wgsl and attention_backward_dkv.wgsl: how they read.
#include "attention_load.wgsl" x=q
#include "attention_load.wgsl" x=dy
#include "attention_load.wgsl" x=k
#include "attention_load.wgsl" x=v
#include "attention_tiles.wgsl"
