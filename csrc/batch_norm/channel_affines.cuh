// The affine maps of a transform's channels, from the batch's statistics or the running ones.
#pragma once

#include "batch_norm/params.h"
#include "common/affine.cuh"

namespace cutlass_bn::batch_norm {

struct ChannelAffines {
  float const* stats;  // as in TransformParams, as are the others
  int64_t channels;
  ChannelVector running_mean, running_var, gamma, beta;
  float eps;

  explicit ChannelAffines(TransformParams const& p)
      : stats(p.stats),
        channels(p.view.channels),
        running_mean(p.layer.running_mean),
        running_var(p.layer.running_var),
        gamma(p.layer.gamma),
        beta(p.layer.beta),
        eps(static_cast<float>(p.layer.eps)) {}

  __device__ __forceinline__ Affine at(int64_t channel) const {
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
    return affine(mean, remainder, gamma.load_or(channel, 1.f) * invstd,
                  beta.load_or(channel, 0.f));
  }
};

}  // namespace cutlass_bn::batch_norm
