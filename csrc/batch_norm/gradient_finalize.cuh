// From a channel's sums to its gradients and the coefficients of dx.
#pragma once

#include "batch_norm/gradient_map.cuh"
#include "batch_norm/params.h"
#include "batch_norm/relu_mask.cuh"
#include "common/affine.cuh"

namespace cutlass_bn::batch_norm {

// GradientSums over tiles.
struct WideSums {
  double dy = 0;
  double product = 0;
};

__device__ __forceinline__ void add(WideSums& a, WideSums const& b) {
  a.dy += b.dy;
  a.product += b.product;
}

__device__ __forceinline__ WideSums shuffle_xor(WideSums const& s, int lanes) {
  constexpr unsigned kAll = 0xffffffffu;
  return {__shfl_xor_sync(kAll, s.dy, lanes), __shfl_xor_sync(kAll, s.product, lanes)};
}

// What the end of a channel takes beside its sums. Asked for early, it arrives while they are being
// made.
struct GradientInputs {
  float mean = 0.f, remainder = 0.f, invstd = 0.f, running_var = 0.f, scale = 1.f, gamma = 1.f,
        beta = 0.f;
};

__device__ __forceinline__ GradientInputs load_inputs(GradientFinalizeParams const& p,
                                                      int64_t channel) {
  GradientInputs inputs;
  if (p.stats != nullptr) {
    inputs.mean = p.stats[channel];
    inputs.remainder = p.stats[p.channels + channel];
    inputs.invstd = p.stats[2 * p.channels + channel];
  } else if (p.running_var) {
    inputs.running_var = p.running_var.load(channel);
  }
  inputs.scale = p.scale.load_or(channel, 1.f);
  inputs.gamma = p.gamma.load_or(channel, 1.f);
  inputs.beta = p.beta.load_or(channel, 0.f);
  return inputs;
}

struct ChannelGradients {
  double dbeta, dgamma, dscale;
  GradientMap map;
  float offset;  // of GradientMaps
};

// The tiles were centred on the rounded mean.
__device__ __forceinline__ ChannelGradients channel_gradients(GradientFinalizeParams const& p,
                                                              WideSums const& sums,
                                                              GradientInputs const& inputs) {
  double const remainder = inputs.remainder, rows = double(p.rows);
  double const product = sums.product - remainder * sums.dy;
  double const invstd = p.stats != nullptr ? double(inputs.invstd)
                                           : rsqrt(double(inputs.running_var) + p.eps);
  double const factor = double(inputs.scale) * invstd;  // of x - mean in x^
  ChannelGradients gradients;
  gradients.dbeta = sums.dy;
  gradients.dgamma = product * factor;
  // sum(dz * (x - mean)) is gamma * invstd * product * (1 - factor^2 * var), and 1 - factor^2 * var
  // is eps * invstd^2.
  gradients.dscale = double(inputs.gamma) * product * p.eps * invstd * invstd * invstd;

  float const gain = gain_of(inputs.gamma, inputs.scale, inputs.invstd);
  double const mean_dy = sums.dy / rows;
  float const rounded_mean_dy = float(mean_dy), slope = float(factor * factor * (product / rows));
  float const shift = float(double(gain) *
                            (double(slope) * remainder - (mean_dy - double(rounded_mean_dy))));
  gradients.map = {inputs.mean, rounded_mean_dy, slope, gain, shift};
  gradients.offset = shift_of(inputs.beta, gain, inputs.remainder);  // v then has the bits of the
                                                                     // forward's
  return gradients;
}

__device__ __forceinline__ void store_gradients(GradientFinalizeParams const& p, int64_t channel,
                                                ChannelGradients const& g) {
  if (p.dbeta) p.dbeta.store(channel, g.dbeta);
  if (p.dgamma) p.dgamma.store(channel, g.dgamma);
  if (p.dscale) p.dscale.store(channel, g.dscale);
  if (p.dshift) p.dshift.store(channel, 0.0);
  if (p.maps.main == nullptr) return;
  p.maps.main[channel] = make_float4(g.map.mean, g.map.mean_dy, g.map.slope, g.map.gain);
  p.maps.shift[channel] = g.map.shift;
  if (p.maps.offset != nullptr) p.maps.offset[channel] = g.offset;
  if (p.maps.threshold == nullptr) return;
  Affine const map{g.map.mean, g.map.gain, g.offset};
  p.maps.threshold[channel] = p.x_dtype == DType::kFloat16 ? relu_threshold<__half>(map)
                                                           : relu_threshold<__nv_bfloat16>(map);
}

}  // namespace cutlass_bn::batch_norm
