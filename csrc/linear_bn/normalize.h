// The pass from u = x W^T to the layer's output.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"
#include "common/layer.h"

namespace cutlass_bn::linear_bn {

struct NormalizeParams {
  void const* u = nullptr;  // [M, N] = x W^T, without scale; row stride ldu
  void* y = nullptr;  // [M, N], row stride ldy; may be u itself where the dtypes and strides are
                      // the same
  int64_t ldu = 0, ldy = 0;  // elements
  int64_t m = 0, n = 0;
  DType u_dtype = DType::kFloat32;
  DType y_dtype = DType::kFloat32;  // u_dtype or float32
  float const* stats = nullptr;     // [3, n] of common/finalize.h; null: the layer's running
                                    // statistics are used
  Layer layer;  // vectors of [n]; with stats the bias doesn't matter, as the mean takes it away
};

// y = act((u - mean) * (gamma * scale * invstd) + beta) of the batch's statistics, or
// y = act((scale * u + (scale * bias - running_mean)) * (gamma / sqrt(running_var + eps)) + beta).
// One kernel.
void launch_normalize(NormalizeParams const& params, cudaStream_t stream);

}  // namespace cutlass_bn::linear_bn
