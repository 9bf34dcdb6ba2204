// One value per channel (gamma, beta, scale, a running buffer), in any of the supported dtypes: parameters follow .half() and
// .bfloat16(), and converting them by kernels of their own would cost more than the layer.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"

namespace cutlass_bn {

struct ChannelVector {
  void const* data = nullptr;  // [C] contiguous; null: absent
  DType dtype = DType::kFloat32;

  __host__ __device__ explicit operator bool() const { return data != nullptr; }

  __device__ __forceinline__ float load(int64_t i) const {
    switch (dtype) {
      case DType::kFloat16: return __half2float(static_cast<__half const*>(data)[i]);
      case DType::kBFloat16: return __bfloat162float(static_cast<__nv_bfloat16 const*>(data)[i]);
      default: return static_cast<float const*>(data)[i];
    }
  }

  // `absent` where the vector is not given: 1 for gamma and scale, 0 for beta and bias.
  __device__ __forceinline__ float load_or(int64_t i, float absent) const { return data ? load(i) : absent; }
};

struct MutableChannelVector {
  void* data = nullptr;  // [C] contiguous; null: absent
  DType dtype = DType::kFloat32;

  __host__ __device__ explicit operator bool() const { return data != nullptr; }

  __device__ __forceinline__ float load(int64_t i) const { return ChannelVector{data, dtype}.load(i); }

  __device__ __forceinline__ void store(int64_t i, double value) const {
    switch (dtype) {
      case DType::kFloat16: static_cast<__half*>(data)[i] = __float2half_rn(static_cast<float>(value)); break;
      case DType::kBFloat16: static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(static_cast<float>(value)); break;
      default: static_cast<float*>(data)[i] = static_cast<float>(value);
    }
  }
};

}  // namespace cutlass_bn
