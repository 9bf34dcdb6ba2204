// Device side of finalize.h: from sums over tiles to what is kept of a channel.
#pragma once

#include "common/finalize.h"

namespace cutlass_bn {

// Sums over tiles around a shift, in fp64. The shift is the first tile's mean, so nothing cancels
// that a merge would keep.
struct TileSums {
  double delta = 0;         // sum n_i * (mean_i - shift)
  double delta_square = 0;  // sum n_i * (mean_i - shift)^2
  double m2 = 0;            // sum M2_i
};

__device__ __forceinline__ void add(TileSums& a, TileSums const& b) {
  a.delta += b.delta;
  a.delta_square += b.delta_square;
  a.m2 += b.m2;
}

// A tile of `count` values whose mean is shift + delta.
__device__ __forceinline__ TileSums tile_sums(double count, double delta, double m2) {
  return {count * delta, count * delta * delta, m2};
}

__device__ __forceinline__ TileSums shuffle_xor(TileSums const& s, int lanes) {
  constexpr unsigned kAll = 0xffffffffu;
  return {__shfl_xor_sync(kAll, s.delta, lanes), __shfl_xor_sync(kAll, s.delta_square, lanes),
          __shfl_xor_sync(kAll, s.m2, lanes)};
}

// What the end of a channel takes beside its sums. Asked for early, it arrives while they are being
// made.
struct FinalizeInputs {
  float scale = 1.f, bias = 0.f, old_mean = 0.f, old_var = 0.f;
};

__device__ __forceinline__ FinalizeInputs load_inputs(FinalizeParams const& p, int64_t channel) {
  FinalizeInputs inputs;
  inputs.scale = p.scale.load_or(channel, 1.f);
  inputs.bias = p.bias.load_or(channel, 0.f);
  if (p.running_mean) {
    inputs.old_mean = p.running_mean.load(channel);
    inputs.old_var = p.running_var.load(channel);
  }
  return inputs;
}

struct ChannelStats {
  float mean, remainder, invstd;  // as in FinalizeParams::stats
  double wide_mean, m2;
};

__device__ __forceinline__ ChannelStats channel_stats(FinalizeParams const& p, double shift,
                                                      TileSums const& sums, float scale) {
  double const rows = double(p.rows);
  double const offset = sums.delta / rows;
  double const mean = shift + offset;
  double const between = sums.delta_square - sums.delta * offset;
  double const m2 = sums.m2 + (between < 0.0 ? 0.0 : between);  // keeps NaN
  float const rounded = float(mean);
  return {rounded, float(mean - double(rounded)),
          float(rsqrt(double(scale) * double(scale) * (m2 / rows) + p.eps)), mean, m2};
}

// Once a channel.
__device__ __forceinline__ void store_stats(FinalizeParams const& p, int64_t channel,
                                            ChannelStats const& s, FinalizeInputs const& inputs) {
  p.stats[channel] = s.mean;
  p.stats[p.channels + channel] = s.remainder;
  p.stats[2 * p.channels + channel] = s.invstd;
  if (channel == 0 && p.num_batches_tracked != nullptr && !p.cumulative)
    *p.num_batches_tracked += 1;
  if (!p.running_mean) return;
  double const factor = p.cumulative ? 1.0 / double(*p.num_batches_tracked + 1) : p.momentum;
  double const scale = inputs.scale;
  double const mean_z = scale * (s.wide_mean + double(inputs.bias));
  double const var_z = scale * scale * (s.m2 / (double(p.rows) - 1.0));
  p.running_mean.store(channel, (1.0 - factor) * double(inputs.old_mean) + factor * mean_z);
  p.running_var.store(channel, (1.0 - factor) * double(inputs.old_var) + factor * var_z);
}

}  // namespace cutlass_bn
