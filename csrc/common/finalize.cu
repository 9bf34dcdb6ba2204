#include "common/finalize.h"

#include "common/finalize_launch.cuh"

namespace cutlass_bn {
namespace {

// Sums over tiles around a shift, in fp64. The shift is the first tile's mean, so nothing cancels that a merge would keep.
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

// kColumns channels a block, the threads of each taking its tiles in turn.
template <int kColumns>
__global__ void __launch_bounds__(kFinalizeThreads) finalize_kernel(FinalizeParams const p) {
  constexpr int kSlices = kFinalizeThreads / kColumns;
  constexpr int kWarps = kFinalizeThreads / 32;
  wait_for_previous_kernel();
  allow_next_kernel();
  int const lane = threadIdx.x % kColumns, slice = threadIdx.x / kColumns;
  int64_t const channel = int64_t(blockIdx.x) * kColumns + lane;
  bool const valid = channel < p.channels;

  // The first threads will need these at the end: asked for now, they arrive meanwhile.
  float scale = 1.f, bias = 0.f, old_mean = 0.f, old_var = 0.f;
  if (valid && slice == 0) {
    scale = p.scale.load_or(channel, 1.f);
    bias = p.bias.load_or(channel, 0.f);
    if (p.running_mean) {
      old_mean = p.running_mean.load(channel);
      old_var = p.running_var.load(channel);
    }
  }

  TileSums sums;
  double const shift = valid ? double(p.partials[channel].x) : 0.0;
  if (valid) {
#pragma unroll 8
    for (int64_t tile = slice; tile < p.tiles; tile += kSlices) {
      float2 const partial = p.partials[tile * p.channels + channel];
      int64_t const left = p.rows - tile * p.rows_per_tile;
      double const count = double(left < p.rows_per_tile ? left : p.rows_per_tile);
      double const delta = double(partial.x) - shift;
      sums.delta += count * delta;
      sums.delta_square += count * delta * delta;
      sums.m2 += double(partial.y);
    }
  }
  for (int distance = 16; distance >= kColumns; distance /= 2) {
    constexpr unsigned kAll = 0xffffffffu;
    add(sums, {__shfl_xor_sync(kAll, sums.delta, distance), __shfl_xor_sync(kAll, sums.delta_square, distance),
               __shfl_xor_sync(kAll, sums.m2, distance)});
  }
  __shared__ TileSums shared[kWarps][kColumns];
  if (threadIdx.x % 32 < kColumns) shared[threadIdx.x / 32][lane] = sums;
  __syncthreads();
  if (slice != 0) return;

  if (channel == 0 && p.num_batches_tracked != nullptr && !p.cumulative) *p.num_batches_tracked += 1;
  if (!valid) return;
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) add(sums, shared[warp][lane]);
  double const rows = double(p.rows);
  double const offset = sums.delta / rows;
  double const mean = shift + offset;
  double const between = sums.delta_square - sums.delta * offset;
  double const m2 = sums.m2 + (between < 0.0 ? 0.0 : between);  // keeps NaN
  double const scale_square = double(scale) * double(scale);

  float const rounded_mean = float(mean);
  p.stats[channel] = rounded_mean;
  p.stats[p.channels + channel] = float(mean - double(rounded_mean));
  p.stats[2 * p.channels + channel] = float(rsqrt(scale_square * (m2 / rows) + p.eps));

  if (p.running_mean) {
    double const factor = p.cumulative ? 1.0 / double(*p.num_batches_tracked) : p.momentum;
    double const mean_z = double(scale) * (mean + double(bias));
    double const var_z = scale_square * (m2 / (rows - 1.0));
    p.running_mean.store(channel, (1.0 - factor) * double(old_mean) + factor * mean_z);
    p.running_var.store(channel, (1.0 - factor) * double(old_var) + factor * var_z);
  }
}

__global__ void count_batch_kernel(int64_t* num_batches_tracked) {
  wait_for_previous_kernel();
  *num_batches_tracked += 1;
}

}  // namespace

void launch_count_batch(int64_t* num_batches_tracked, cudaStream_t stream) {
  launch_kernel(count_batch_kernel, dim3(1), dim3(1), 0, stream, num_batches_tracked);
}

void launch_finalize(FinalizeParams const& params, cudaStream_t stream) {
  // A cumulative average divides by the counter in every block, so it has to advance before all of them.
  if (params.cumulative && params.num_batches_tracked != nullptr) launch_count_batch(params.num_batches_tracked, stream);
  launch_finalize_kernel(finalize_kernel<32>, finalize_kernel<8>, params, stream);
}

}  // namespace cutlass_bn
