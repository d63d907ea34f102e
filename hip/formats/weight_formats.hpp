// The formats of frozen weights [out, in]. Each kernel of linear.hip, gemm_f32.hip and gemm_split.hip is made for every
// format of WEIGHT_FORMATS; gemv.hip (one row) also for those of eights_formats.hpp; quantize.hip, which restores a
// whole weight, for these and WHOLE_UNIT_FORMATS, whose rows are multiples of 8 elements. A line for each format:
//
//     FORMAT(name, TAG)    name: in the kernels' names. The format's header defines TAG_PARAMETERS, the format's part
//                          of a kernel's parameters, and TAG_WEIGHT, an expression that makes the weight of them.
//
// The parameters come in the order in which gemm/linear.py packs them. The weight's type, in the format's header, has:
//     Ahead look(origin, offset)                  starts the loads that those of `fetch` wait for, a tile earlier
//     Raw fetch(origin, offset, count, ahead)     starts the loads of 8 elements, of which `count` lie in the matrix
//     static arrive(raw)                          an optimization barrier for what was loaded: the wait stays here
//     Raw4 fetch4(origin, offset)                 the same of 4 elements, at once, for products in float32
//     float scale(raw), float value(raw, i)       element i of either is their product; every lane takes part
// Elements are numbered row by row, from `origin` (the same for all lanes) + `offset`, a multiple of 8 (of 4).
// GEMMs of experts (gemm_grouped.hip) have EXPERT_FORMATS too, without Raw4.
#pragma once
#include "mxfp4.hpp"
#include "nf4.hpp"
#include "q8_0.hpp"

#define WHOLE_UNIT_FORMATS(FORMAT) FORMAT(q8_0, Q8_0)
#define WEIGHT_FORMATS(FORMAT)   \
  FORMAT(nf4, NF4)               \
  FORMAT(nf4_nested, NF4_NESTED) \
  WHOLE_UNIT_FORMATS(FORMAT)
#define EXPERT_FORMATS(FORMAT) FORMAT(mxfp4, MXFP4_EXPERTS)

// 8 elements at a time, from a multiple of 8 on.
template <class Format> struct WeightRow {
  Format weight;
  GPU_FN gpu::Eight fetch(long i, int) const {
    const auto raw = weight.fetch(i, 0, 8, weight.look(i, 0));
    const float s = weight.scale(raw);
    gpu::Eight x;
#pragma unroll
    for (int e = 0; e < 8; ++e) x.at[e] = s * weight.value(raw, e);
    return x;
  }
};
