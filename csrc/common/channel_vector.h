// One value per channel (gamma, beta, scale, a running buffer), in any of the supported dtypes:
// parameters follow .half() and .bfloat16(), and converting them by kernels of their own would cost
// more than the layer.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"

namespace cutlass_bn {

struct ChannelVector {
  void const* data = nullptr;  // [C] contiguous; null: absent
  DType dtype = DType::kFloat32;

  __host__ __device__ explicit operator bool() const { return data != nullptr; }

#ifdef __CUDACC__
  __device__ __forceinline__ float load(int64_t i) const { return load_if(true, i); }

  // `absent` where the vector is not given: 1 for gamma and scale, 0 for beta and bias.
  __device__ __forceinline__ float load_or(int64_t i, float absent) const {
    float const value = load_if(data != nullptr, i);
    return data ? value : absent;
  }

 private:
  // Without branches, so that the loads of several vectors are in flight together. Volatile: stays
  // behind wait_for_previous_kernel().
  __device__ __forceinline__ float load_if(bool present, int64_t i) const {
    bool const wide = dtype == DType::kFloat32;
    char const* const p = static_cast<char const*>(data) + i * (wide ? 4 : 2);
    uint32_t bits = 0;
    asm volatile(
        "{\n"
        ".reg .pred wide, narrow;\n"
        ".reg .b16 half;\n"
        "setp.ne.u32 wide, %2, 0;\n"
        "setp.ne.u32 narrow, %3, 0;\n"
        "@wide ld.global.b32 %0, [%1];\n"
        "@narrow ld.global.b16 half, [%1];\n"
        "@narrow cvt.u32.u16 %0, half;\n"
        "}\n"
        : "+r"(bits)
        : "l"(p), "r"(uint32_t(present && wide)), "r"(uint32_t(present && !wide)));
    float const as_half = __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
    float const as_float = __uint_as_float(dtype == DType::kBFloat16 ? bits << 16 : bits);
    return dtype == DType::kFloat16 ? as_half : as_float;
  }
#endif
};

struct MutableChannelVector {
  void* data = nullptr;  // [C] contiguous; null: absent
  DType dtype = DType::kFloat32;

  __host__ __device__ explicit operator bool() const { return data != nullptr; }

#ifdef __CUDACC__
  __device__ __forceinline__ float load(int64_t i) const {
    return ChannelVector{data, dtype}.load(i);
  }

  __device__ __forceinline__ void store(int64_t i, double value) const {
    switch (dtype) {
      case DType::kFloat16:
        static_cast<__half*>(data)[i] = __float2half_rn(static_cast<float>(value));
        break;
      case DType::kBFloat16:
        static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(static_cast<float>(value));
        break;
      default: static_cast<float*>(data)[i] = static_cast<float>(value);
    }
  }
#endif
};

}  // namespace cutlass_bn
