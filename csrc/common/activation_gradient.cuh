// Derivatives of the activations.
#pragma once

#include "common/activation.h"

namespace cutlass_bn {

// Phi(v) + v phi(v), both of one exponential. The polynomial (Abramowitz and Stegun 7.1.26) is within 7.5e-8 of Phi: as exact as
// 1 + erff(v) where both are rounded to float32, at a third of its cost.
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

// Calls body(gradient) once, where gradient(dy, v) = dy * act'(v): one branch for as many elements as the body has. As in torch, relu
// passes nothing on at 0, and whatever comes, Inf and NaN too, where v is NaN.
template <class Body>
__device__ __forceinline__ void with_activation_gradient(Activation activation, Body const& body) {
  switch (activation) {
    case Activation::kRelu: return body([](float dy, float v) { return v <= 0.f ? 0.f : dy; });
    case Activation::kGelu: return body([](float dy, float v) { return dy * gelu_derivative(v); });
    case Activation::kSilu: return body([](float dy, float v) { return dy * silu_derivative(v); });
    default: return body([](float dy, float) { return dy; });
  }
}

}  // namespace cutlass_bn
