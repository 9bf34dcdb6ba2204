#include "common/finalize.cuh"
#include "common/finalize_launch.cuh"

namespace cutlass_bn {
namespace {

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
  FinalizeInputs inputs;
  if (valid && slice == 0) inputs = load_inputs(p, channel);

  TileSums sums;
  double const shift = valid ? double(p.partials[channel].x) : 0.0;
  if (valid) {
#pragma unroll 8
    for (int64_t tile = slice; tile < p.tiles; tile += kSlices) {
      float2 const partial = p.partials[tile * p.channels + channel];
      float const remainder = p.remainders != nullptr ? p.remainders[tile * p.channels + channel] : 0.f;
      int64_t const left = p.rows - tile * p.rows_per_tile;
      double const count = double(left < p.rows_per_tile ? left : p.rows_per_tile);
      add(sums, tile_sums(count, (double(partial.x) - shift) + double(remainder), double(partial.y)));
    }
  }
  for (int distance = 16; distance >= kColumns; distance /= 2) add(sums, shuffle_xor(sums, distance));
  __shared__ TileSums shared[kWarps][kColumns];
  if (threadIdx.x % 32 < kColumns) shared[threadIdx.x / 32][lane] = sums;
  __syncthreads();
  if (slice != 0 || !valid) return;
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) add(sums, shared[warp][lane]);
  store_stats(p, channel, channel_stats(p, shift, sums, inputs.scale), inputs);
}

__global__ void count_batch_kernel(int64_t* num_batches_tracked) {
  wait_for_previous_kernel();
  *num_batches_tracked += 1;
}

}  // namespace

void launch_count_batch(int64_t* num_batches_tracked, cudaStream_t stream) {
  launch_kernel(count_batch_kernel, dim3(1), dim3(1), 0, stream, num_batches_tracked);
}

void launch_count_after(FinalizeParams const& params, cudaStream_t stream) {
  if (params.cumulative && params.num_batches_tracked != nullptr) launch_count_batch(params.num_batches_tracked, stream);
}

void launch_finalize(FinalizeParams const& params, cudaStream_t stream) {
  launch_finalize_kernel(finalize_kernel<32>, finalize_kernel<8>, params, stream);
  launch_count_after(params, stream);
}

}  // namespace cutlass_bn
