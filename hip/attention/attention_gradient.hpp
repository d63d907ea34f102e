// The gradient of attention, block by block: what attention_backward_dq.hip and attention_backward_dkv.hip share.
//
// A work-group owns COLUMNS rows of one side (dq: queries; dk and dv: keys) and walks over the other side's rows, ROWS
// at a time. With x the owned rows and y the walked ones (operands of the scores: x1, y1 = q and k; of their
// gradients: x2, y2 = do and v), a wave has 16 TILES owned rows as columns of every matmul:
//
//     s = y1 x1^T        p = exp(scale s - lse)       result1^T += y1^T ds    (dq^T = k^T ds, or dk^T = q^T ds)
//     g = y2 x2^T        ds = p (g - delta)           result2^T += y2^T p     (dv^T = do^T p; not for dq)
//
// y1 and y2 go through LDS, as operand A: read along the head width, and transposed. x1 and x2 are operand B. p and ds
// leave the tensor cores as operand B of the next matmul (attention_matrix.hpp).
//
// The loops over tiles of y are those of CDNA, of RDNA, and of RDNA with heads of 256. attention.md draws them;
// attention_walk.hpp has the mask, attention_range.hpp float16's range.
// Source: Dao, FlashAttention-2 (arXiv:2307.08691), algorithm 2.
#pragma once
#include "attention_gradient_columns.hpp"
#if GPU_CDNA
#include "attention_gradient_cdna.hpp"
#else
#include "attention_gradient_rdna.hpp"
#include "attention_gradient_pairs.hpp"
#endif
