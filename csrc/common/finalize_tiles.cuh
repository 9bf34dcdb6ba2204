// What the finalize kernels, forward and backward, share: kColumns channels a block, the threads of
// each taking its tiles in turn.
#pragma once

#include <cstdint>

#include "common/launch.cuh"
#include "common/math.h"

namespace cutlass_bn {

inline constexpr int kFinalizeThreads = 512;

template <int kColumns>
struct FinalizeThread {
  int lane = threadIdx.x % kColumns, slice = threadIdx.x / kColumns;
  int64_t channel = int64_t(blockIdx.x) * kColumns + lane;

  // The sum of of_tile(tile) over all tiles, in a fixed order. Slice 0 has the result. All threads
  // of the block call it.
  template <class Sums, class OfTile>
  __device__ __forceinline__ Sums add_tiles(bool valid, int64_t tiles,
                                            OfTile const& of_tile) const {
    constexpr int kSlices = kFinalizeThreads / kColumns, kWarps = kFinalizeThreads / 32;
    Sums sums;
    if (valid) {
#pragma unroll 8
      for (int64_t tile = slice; tile < tiles; tile += kSlices) add(sums, of_tile(tile));
    }
    for (int distance = 16; distance >= kColumns; distance /= 2)
      add(sums, shuffle_xor(sums, distance));
    __shared__ Sums shared[kWarps][kColumns];
    if (threadIdx.x % 32 < kColumns) shared[threadIdx.x / 32][lane] = sums;
    __syncthreads();
    if (slice != 0) return {};
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) add(sums, shared[warp][lane]);
    return sums;
  }
};

// A kernel for 32 channels a block and one for 8: few channels get narrow blocks, or there would be
// too few of them.
template <class Params>
void launch_finalize_kernel(void (*wide)(Params), void (*narrow)(Params), Params const& params,
                            cudaStream_t stream) {
  bool const many = params.channels >= 32 * device_info().sm_count / 2;
  dim3 const grid(static_cast<unsigned>(ceil_div(params.channels, many ? 32 : 8)));
  launch_kernel(many ? wide : narrow, grid, dim3(kFinalizeThreads), 0, stream, params);
}

}  // namespace cutlass_bn
