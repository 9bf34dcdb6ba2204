// The affine map that batch normalisation is for one channel, worked out from the layer's vectors.
#pragma once

#include <cstdint>

#include "common/layer.h"

namespace cutlass_bn {

// y = (u - mean) * gain + shift.
struct Affine {
  float mean, gain, shift;

  // u - mean first: gain * u + c would cancel at a large mean. It is beta exactly where u is the
  // mean.
  __device__ __forceinline__ float operator()(float u) const { return fmaf(u - mean, gain, shift); }
};

__device__ __forceinline__ float gain_of(float gamma, float scale, float invstd) {
  return gamma * (scale * invstd);
}

// remainder: what rounding left over of the mean.
__device__ __forceinline__ float shift_of(float beta, float gain, float remainder) {
  // Not 0 * gain: with eps 0 a variance of 0 makes the gain infinite, and y is then infinite but
  // where u is the mean.
  return remainder == 0.f ? beta : fmaf(-remainder, gain, beta);
}

__device__ __forceinline__ Affine affine(float mean, float remainder, float gain, float beta) {
  return {mean, gain, shift_of(beta, gain, remainder)};
}

// y = (scale * u + shift) * factor + beta: eval of a layer with bias and scale. The mean is in
// shift, subtracted before the large factor is applied.
struct alignas(16) FoldedAffine {
  float scale, shift, factor, beta;

  __device__ __forceinline__ float operator()(float u) const {
    return fmaf(fmaf(scale, u, shift), factor, beta);
  }
};

__device__ __forceinline__ FoldedAffine folded_affine(Layer const& layer, int64_t channel) {
  float const scale = layer.scale.load_or(channel, 1.f);
  float const shift = fmaf(scale, layer.bias.load_or(channel, 0.f),
                           -layer.running_mean.load(channel));
  float const invstd = __frsqrt_rn(layer.running_var.load(channel) + float(layer.eps));
  return {scale, shift, layer.gamma.load_or(channel, 1.f) * invstd,
          layer.beta.load_or(channel, 0.f)};
}

// One branch a vector instead of one an element.
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
    case Activation::kLeakyRelu:
      apply([](float x) { return activate(x, Activation::kLeakyRelu); });
      break;
    default: break;
  }
}

}  // namespace cutlass_bn
