// The transpose of a float32 matrix in memory, for cuBLAS: its TF32 kernels want K adjacent in both
// operands.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace cutlass_bn::linear_bn {

struct TransposeParams {
  float const* x = nullptr;  // [rows, columns], row stride ldx
  float* y = nullptr;        // [columns, rows], row stride ldy
  int64_t rows = 0, columns = 0;
  int64_t ldx = 0, ldy = 0;  // elements
};

// One kernel launch. Fastest where rows and columns are multiples of 4 and all rows are 16-byte
// aligned.
void launch_transpose(TransposeParams const& params, cudaStream_t stream);

}  // namespace cutlass_bn::linear_bn
