// What the normalise kernels are told. The GEMM's own parameters are in gemm/launch.h.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/activation.h"
#include "common/channel_vector.h"
#include "common/dtype.h"

namespace cutlass_bn::linear_bn {

// The part of u that is read and the part of y that is written: rows [0, m) of the columns [n_begin, n_end).
struct NormalizeTensors {
  void const* u = nullptr;   // [M, N] = x W^T, without scale; row stride ldu
  void* y = nullptr;         // [M, N], row stride ldy; may be u itself where the dtypes and strides are the same
  int64_t ldu = 0, ldy = 0;  // elements
  int64_t m = 0;
  int64_t n_begin = 0, n_end = 0;
  DType u_dtype = DType::kFloat32;
  DType y_dtype = DType::kFloat32;  // u_dtype or float32
  Activation activation = Activation::kNone;
};

struct NormalizeParams {
  NormalizeTensors tensors;
  float const* stats = nullptr;      // [3, n]: mean of u rounded to fp32, what that rounding left over, invstd
  int64_t n = 0;                     // row length of stats
  ChannelVector scale, gamma, beta;  // [n]; absent: 1, 1, 0
};

struct NormalizeInferenceParams {
  NormalizeTensors tensors;
  ChannelVector bias, scale;                // [n]; absent: 0, 1
  ChannelVector running_mean, running_var;  // [n]
  ChannelVector gamma, beta;                // [n]; absent: 1, 0
  float eps = 1e-5f;
};

}  // namespace cutlass_bn::linear_bn
