// More formats of frozen weights. gemv.hip (one row) decodes them inside; for more rows the weight is restored
// first (quantize.hip, gemm/linear.py), as GEMM kernels for them would double the number of kernels. A line for each,
// as in weight_formats.hpp; the weight's type has
//     gpu::Eight eight(i)                         8 elements from i on, a multiple of 8
#pragma once
#include "codebook.hpp"
#include "iq1.hpp"
#include "levels.hpp"
#include "mxfp4.hpp"
#include "q4_k.hpp"
#include "q4_q5.hpp"
#include "q5_k.hpp"
#include "q6_k.hpp"
#include "twos.hpp"

#define EIGHTS_FORMATS(FORMAT) \
  FORMAT(q4_0, Q4_0)           \
  FORMAT(q4_1, Q4_1)           \
  FORMAT(q5_0, Q5_0)           \
  FORMAT(q5_1, Q5_1)           \
  FORMAT(mxfp4, MXFP4)         \
  FORMAT(nvfp4, NVFP4)         \
  FORMAT(iq4_nl, IQ4_NL)       \
  FORMAT(iq4_xs, IQ4_XS)       \
  FORMAT(iq1_s, IQ1_S)         \
  FORMAT(iq1_m, IQ1_M)         \
  FORMAT(iq2_xxs, IQ2_XXS)     \
  FORMAT(iq2_xs, IQ2_XS)       \
  FORMAT(iq2_s, IQ2_S)         \
  FORMAT(iq3_xxs, IQ3_XXS)     \
  FORMAT(iq3_s, IQ3_S)         \
  FORMAT(tq2_0, TQ2_0)         \
  FORMAT(q2_k, Q2_K)           \
  FORMAT(q3_k, Q3_K)           \
  FORMAT(q4_k, Q4_K)           \
  FORMAT(q5_k, Q5_K)           \
  FORMAT(q6_k, Q6_K)

template <class Format> struct EightsRow {
  Format weight;
  GPU_FN gpu::Eight fetch(long i, int) const { return weight.eight(i); }
};
