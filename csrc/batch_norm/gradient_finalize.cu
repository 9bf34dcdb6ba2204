// From sums over tiles to dweight, dbias, dscale and the coefficients of dx.
#include "batch_norm/gradient_map.cuh"
#include "batch_norm/launch.h"
#include "common/finalize_launch.cuh"

namespace cutlass_bn::batch_norm {
namespace {

struct WideSums {
  double dy = 0;
  double product = 0;
};

__device__ __forceinline__ void add(WideSums& a, WideSums const& b) {
  a.dy += b.dy;
  a.product += b.product;
}

// Laid out as finalize_kernel (common/finalize.cu): kColumns channels a block, the threads of each taking its tiles in turn.
template <int kColumns>
__global__ void __launch_bounds__(kFinalizeThreads) gradient_finalize_kernel(__grid_constant__ GradientFinalizeParams const p) {
  constexpr int kSlices = kFinalizeThreads / kColumns;
  constexpr int kWarps = kFinalizeThreads / 32;
  wait_for_previous_kernel();
  allow_next_kernel();
  int const lane = threadIdx.x % kColumns, slice = threadIdx.x / kColumns;
  int64_t const channel = int64_t(blockIdx.x) * kColumns + lane;
  bool const valid = channel < p.channels;

  // The first threads will need these at the end: asked for now, they arrive meanwhile.
  float mean = 0.f, remainder = 0.f, invstd = 0.f, running_var = 0.f, scale = 1.f, weight = 1.f, bias = 0.f;
  if (valid && slice == 0) {
    if (p.stats != nullptr) {
      mean = p.stats[channel];
      remainder = p.stats[p.channels + channel];
      invstd = p.stats[2 * p.channels + channel];
    } else if (p.running_var) {
      running_var = p.running_var.load(channel);
    }
    scale = p.scale.load_or(channel, 1.f);
    weight = p.weight.load_or(channel, 1.f);
    bias = p.bias.load_or(channel, 0.f);
  }

  WideSums sums;
  if (valid) {
#pragma unroll 8
    for (int64_t tile = slice; tile < p.tiles; tile += kSlices) {
      float2 const partial = p.partials[tile * p.channels + channel];
      add(sums, {double(partial.x), double(partial.y)});
    }
  }
  for (int distance = 16; distance >= kColumns; distance /= 2) {
    constexpr unsigned kAll = 0xffffffffu;
    add(sums, {__shfl_xor_sync(kAll, sums.dy, distance), __shfl_xor_sync(kAll, sums.product, distance)});
  }
  __shared__ WideSums shared[kWarps][kColumns];
  if (threadIdx.x % 32 < kColumns) shared[threadIdx.x / 32][lane] = sums;
  __syncthreads();
  if (slice != 0 || !valid) return;
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) add(sums, shared[warp][lane]);

  // The tiles were centred on the rounded mean.
  double const product = sums.product - double(remainder) * sums.dy;
  double const wide_invstd = p.stats != nullptr ? double(invstd) : rsqrt(double(running_var) + p.eps);
  double const factor = double(scale) * wide_invstd;  // of x - mean in x^
  if (p.dbias) p.dbias.store(channel, sums.dy);
  if (p.dweight) p.dweight.store(channel, product * factor);
  // sum(dz * (x - mean)) is weight * invstd * product * (1 - factor^2 * var), and 1 - factor^2 * var is eps * invstd^2.
  if (p.dscale) p.dscale.store(channel, double(weight) * product * p.eps * wide_invstd * wide_invstd * wide_invstd);
  if (p.maps.main == nullptr) return;
  float const gain = activated_gain(weight, scale, invstd);
  double const mean_dy = sums.dy / double(p.rows);
  float const rounded_mean_dy = float(mean_dy), slope = float(factor * factor * (product / double(p.rows)));
  p.maps.main[channel] = make_float4(mean, rounded_mean_dy, slope, gain);
  p.maps.shift[channel] = float(double(gain) * (double(slope) * double(remainder) - (mean_dy - double(rounded_mean_dy))));
  if (p.maps.offset != nullptr) p.maps.offset[channel] = activated_offset(bias, gain, remainder);
}

}  // namespace

void launch_gradient_finalize(GradientFinalizeParams const& params, cudaStream_t stream) {
  CUTLASS_BN_CHECK((params.maps.main == nullptr && !params.dscale) || params.stats != nullptr, "maps: expected stats, got none");
  launch_finalize_kernel(gradient_finalize_kernel<32>, gradient_finalize_kernel<8>, params, stream);
}

}  // namespace cutlass_bn::batch_norm
