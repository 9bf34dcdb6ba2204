// Derivatives of the activations.
#pragma once

#include <type_traits>

#include "common/activation.h"
#include "common/check.h"

namespace cutlass_bn {

// Phi(v) + v phi(v), both of one exponential. The polynomial (Abramowitz and Stegun 7.1.26) is
// within 7.5e-8 of Phi: as exact as 1 + erff(v) where both are rounded to float32, at a third of
// its cost.
__device__ __forceinline__ float gelu_derivative(float v) {
  float const density = 0.3989422804014327f * __expf(-0.5f * v * v);
  float const t = __fdividef(1.f, fmaf(fabsf(v), 0.3275911f * 0.7071067811865475f, 1.f));
  // The coefficients, times sqrt(pi / 2), as density has the factor 1 / sqrt(2 pi).
  float tail = fmaf(t, 1.330274429f, -1.821255978f);
  tail = fmaf(t, tail, 1.781477937f);
  tail = fmaf(t, tail, -0.356563782f);
  tail = fmaf(t, tail, 0.31938153f) * t * density;  // Phi(-|v|)
  float const probability = v < 0.f ? tail : 1.f - tail;
  return fmaf(v, density, probability);
}

__device__ __forceinline__ float silu_derivative(float v) {
  float const sigmoid = __fdividef(1.f, 1.f + expf(-v));
  return sigmoid * fmaf(v, 1.f - sigmoid, 1.f);
}

// dy * act'(v). As in torch, at 0 relu passes nothing on and leaky_relu its slope; relu passes
// whatever comes, Inf and NaN too, where v is NaN.
template <Activation kActivation>
__device__ __forceinline__ float activation_gradient(float dy, float v) {
  if constexpr (kActivation == Activation::kRelu) {
    return v <= 0.f ? 0.f : dy;
  } else if constexpr (kActivation == Activation::kGelu) {
    return dy * gelu_derivative(v);
  } else if constexpr (kActivation == Activation::kSilu) {
    return dy * silu_derivative(v);
  } else if constexpr (kActivation == Activation::kLeakyRelu) {
    return v > 0.f ? dy : dy * kLeakySlope;
  } else {
    return dy;
  }
}

// Calls body(std::integral_constant<Activation, ...>{}): a kernel for each. A branch in the kernel,
// taken for every column or vector, costs more than it looks
// (docs/notes/2026-11-29-memory-bound-kernels.md).
template <class Body>
void dispatch_activation(Activation activation, Body&& body) {
  switch (activation) {
    case Activation::kNone: return body(std::integral_constant<Activation, Activation::kNone>{});
    case Activation::kRelu: return body(std::integral_constant<Activation, Activation::kRelu>{});
    case Activation::kGelu: return body(std::integral_constant<Activation, Activation::kGelu>{});
    case Activation::kSilu: return body(std::integral_constant<Activation, Activation::kSilu>{});
    case Activation::kLeakyRelu:
      return body(std::integral_constant<Activation, Activation::kLeakyRelu>{});
  }
  fail("unknown activation code ", static_cast<int>(activation));
}

}  // namespace cutlass_bn
