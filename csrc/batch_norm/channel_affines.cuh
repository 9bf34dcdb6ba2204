// The affine maps of a transform's channels, from the batch's statistics or the running ones.
#pragma once

#include "batch_norm/params.h"
#include "common/affine.cuh"

namespace cutlass_bn::batch_norm {

struct ChannelAffines {
  float const* stats;  // as in TransformParams
  int64_t channels;
  ChannelVector running_mean, running_var, scale, gamma, beta;
  float eps;

  ChannelAffines(float const* stats, int64_t channels, Layer const& layer)
      : stats(stats),
        channels(channels),
        running_mean(layer.running_mean),
        running_var(layer.running_var),
        scale(layer.scale),
        gamma(layer.gamma),
        beta(layer.beta),
        eps(static_cast<float>(layer.eps)) {}

  // Of at(); 0 where there is none.
  __device__ __forceinline__ float mean_at(int64_t channel) const {
    ChannelVector const mean = stats != nullptr ? ChannelVector{stats, DType::kFloat32}
                                                : running_mean;
    return mean.load_or(channel, 0.f);
  }

  __device__ __forceinline__ Affine at(int64_t channel) const {
    float mean, remainder, invstd;
    if (stats != nullptr) {
      ChannelVector const values{stats, DType::kFloat32};
      mean = values.load(channel);
      remainder = values.load(channels + channel);
      invstd = values.load(2 * channels + channel);
    } else {
      mean = running_mean.load_or(channel, 0.f);
      remainder = 0.f;
      invstd = __frsqrt_rn(running_var.load(channel) + eps);
    }
    return affine(mean, remainder,
                  gain_of(gamma.load_or(channel, 1.f), scale.load_or(channel, 1.f), invstd),
                  beta.load_or(channel, 0.f));
  }
};

}  // namespace cutlass_bn::batch_norm
