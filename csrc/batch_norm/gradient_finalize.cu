// From sums over tiles to dweight, dbias, dscale and the coefficients of dx.
#include "batch_norm/gradient_finalize.cuh"
#include "batch_norm/launch.h"
#include "common/finalize_launch.cuh"

namespace cutlass_bn::batch_norm {
namespace {

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
  GradientInputs inputs;
  if (valid && slice == 0) inputs = load_inputs(p, channel);

  WideSums sums;
  if (valid) {
#pragma unroll 8
    for (int64_t tile = slice; tile < p.tiles; tile += kSlices) {
      float2 const partial = p.partials[tile * p.channels + channel];
      add(sums, {double(partial.x), double(partial.y)});
    }
  }
  for (int distance = 16; distance >= kColumns; distance /= 2) add(sums, shuffle_xor(sums, distance));
  __shared__ WideSums shared[kWarps][kColumns];
  if (threadIdx.x % 32 < kColumns) shared[threadIdx.x / 32][lane] = sums;
  __syncthreads();
  if (slice != 0 || !valid) return;
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) add(sums, shared[warp][lane]);
  store_gradients(p, channel, channel_gradients(p, sums, inputs));
}

}  // namespace

void launch_gradient_finalize(GradientFinalizeParams const& params, cudaStream_t stream) {
  CUTLASS_BN_CHECK((params.maps.main == nullptr && !params.dscale) || params.stats != nullptr, "maps: expected stats, got none");
  launch_finalize_kernel(gradient_finalize_kernel<32>, gradient_finalize_kernel<8>, params, stream);
}

}  // namespace cutlass_bn::batch_norm
