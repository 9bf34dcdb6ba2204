// y = (x - mean) * gain + shift, one channel's part of the transform.
#pragma once

#include "batch_norm/params.h"

namespace cutlass_bn::batch_norm {

struct ChannelMap {
  float mean, gain, shift;

  // x - mean first: gain * x + c would cancel at a large mean. It equals bias exactly where x is the mean.
  __device__ __forceinline__ float operator()(float x) const { return fmaf(x - mean, gain, shift); }
};

__device__ __forceinline__ ChannelMap channel_map(float mean, float remainder, float invstd, float weight, float bias) {
  float const gain = weight * invstd;
  // Not 0 * gain: with eps 0 a variance of 0 makes the gain infinite, and y is then infinite but where x is the mean.
  return {mean, gain, remainder == 0.f ? bias : fmaf(-remainder, gain, bias)};
}

struct ChannelMapParams {
  float const* stats;
  int64_t channels;
  ChannelVector running_mean, running_var, weight, bias;
  float eps;

  explicit ChannelMapParams(TransformParams const& p)
      : stats(p.stats),
        channels(p.view.channels),
        running_mean(p.running_mean),
        running_var(p.running_var),
        weight(p.weight),
        bias(p.bias),
        eps(p.eps) {}

  __device__ __forceinline__ ChannelMap at(int64_t channel) const {
    float mean, remainder, invstd;
    if (stats != nullptr) {
      mean = stats[channel];
      remainder = stats[channels + channel];
      invstd = stats[2 * channels + channel];
    } else {
      mean = running_mean.load_or(channel, 0.f);
      remainder = 0.f;
      invstd = __frsqrt_rn(running_var.load(channel) + eps);
    }
    return channel_map(mean, remainder, invstd, weight.load_or(channel, 1.f), bias.load_or(channel, 0.f));
  }
};

}  // namespace cutlass_bn::batch_norm
