// The activations that can be fused behind the normalisation.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

namespace cutlass_bn {

enum class Activation : int { kNone = 0, kRelu = 1, kGelu = 2, kSilu = 3, kLeakyRelu = 4 };

inline constexpr float kLeakySlope = 0.01f;  // torch.nn.functional.leaky_relu's default

// gelu is the exact erf form, torch.nn.functional.gelu's default. relu keeps NaN, as torch's does.
__host__ __device__ __forceinline__ float activate(float v, Activation activation) {
  switch (activation) {
    case Activation::kRelu: return v < 0.f ? 0.f : v;
    case Activation::kGelu: return 0.5f * v * (1.f + erff(v * 0.70710678118654752f));
    case Activation::kSilu: return v / (1.f + expf(-v));
    case Activation::kLeakyRelu: return v > 0.f ? v : v * kLeakySlope;
    default: return v;
  }
}

}  // namespace cutlass_bn
