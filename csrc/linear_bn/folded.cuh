// The layer's formula for one column, worked out from its parameters.
#pragma once

#include <cstdint>

#include "common/activation.h"

namespace cutlass_bn::linear_bn {

// y = act((scale * u + shift) * factor + beta). For a batch's statistics scale is 1 and shift -mean: the mean is subtracted before
// anything is multiplied, as multiplying out would cancel at a large mean.
struct ColumnMap {
  float scale, shift, factor, beta;

  __device__ __forceinline__ float operator()(float u) const { return fmaf(fmaf(scale, u, shift), factor, beta); }
};

// From running statistics. Params: any struct with these vectors and eps.
template <class Params>
__device__ __forceinline__ ColumnMap folded_map(Params const& p, int64_t column) {
  float const scale = p.scale.load_or(column, 1.f);
  float const shift = fmaf(scale, p.bias.load_or(column, 0.f), -p.running_mean.load(column));
  float const factor = p.gamma.load_or(column, 1.f) * __frsqrt_rn(p.running_var.load(column) + p.eps);
  return {scale, shift, factor, p.beta.load_or(column, 0.f)};
}

// One branch per vector instead of one per element.
template <int N>
__device__ __forceinline__ void activate_all(float (&v)[N], Activation activation) {
  auto const apply = [&v](auto const& function) {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = function(v[i]);
  };
  switch (activation) {
    case Activation::kRelu: apply([](float x) { return activate(x, Activation::kRelu); }); break;
    case Activation::kGelu: apply([](float x) { return activate(x, Activation::kGelu); }); break;
    case Activation::kSilu: apply([](float x) { return activate(x, Activation::kSilu); }); break;
    default: break;
  }
}

}  // namespace cutlass_bn::linear_bn
