// What the split can't hold is computed in float32: these run after a split GEMM and recompute,
// with plain FMAs, every tile of its output with a product that the census of the operands leaves
// to them (split.h). One kernel launch each, which ends at once where no row is lossy.
// Deterministic; Inf and NaN come out where float32 products put them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/layer.h"

namespace cutlass_bn::linear_bn {

// An operand as it was before it was split, with the census of its split.
struct ExactOperand {
  float const* data = nullptr;       // [rows, k]; fastest where 16-byte aligned
  int64_t row_stride = 0;            // elements. One of the strides is 1
  int64_t k_stride = 0;              // elements
  uint32_t const* census = nullptr;  // [rows]
};

// u = x w^T. A tile is rows_per_tile rows by 64 columns; all of it is recomputed, so that the
// moments of its columns are of one kind.
struct ExactProblem {
  ExactOperand x;  // M rows
  ExactOperand w;  // N rows
  int64_t m = 0, n = 0, k = 0;
  int rows_per_tile = 128;  // of the GEMM's tile: 128 or 64
};

// u and the moments of its columns.
struct ExactMoments {
  ExactProblem problem;
  float* u = nullptr;          // [M, N], row stride ldu
  int64_t ldu = 0;             // elements
  float2* partials = nullptr;  // [ceil(M / rows_per_tile), N]: (mean, M2) of u over each tile's
                               // rows
};

// y = act(BatchNorm(scale * (u + bias))) from running statistics.
struct ExactInference {
  ExactProblem problem;
  float* y = nullptr;  // [M, N], row stride ldy
  int64_t ldy = 0;     // elements
  Layer layer;         // vectors of [N]
};

// u alone.
struct ExactProduct {
  ExactProblem problem;
  float* out = nullptr;  // [M, N], row stride ldo
  int64_t ldo = 0;       // elements
};

void launch_exact(ExactMoments const& params, cudaStream_t stream);
void launch_exact(ExactInference const& params, cudaStream_t stream);
void launch_exact(ExactProduct const& params, cudaStream_t stream);

}  // namespace cutlass_bn::linear_bn
