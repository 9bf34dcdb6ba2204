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

  // The sum of of_tile(tile, load(tile)) over all tiles, in a fixed order. Slice 0 has the result.
  // All threads of the block call it. Many loads are in flight together: one tile after the other
  // would cost a round trip to memory each.
  template <class Sums, class Load, class OfTile>
  __device__ __forceinline__ Sums add_tiles(bool valid, int64_t tiles, Load const& load,
                                            OfTile const& of_tile) const {
    constexpr int kSlices = kFinalizeThreads / kColumns, kWarps = kFinalizeThreads / 32;
    constexpr int kInFlight = 16;
    Sums sums;
    if (valid) {
#pragma unroll 1
      for (int64_t first = slice; first < tiles; first += kSlices * kInFlight) {
        decltype(load(first)) loaded[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          if (first + i * kSlices < tiles) loaded[i] = load(first + i * kSlices);
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          if (first + i * kSlices < tiles) add(sums, of_tile(first + i * kSlices, loaded[i]));
        }
      }
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

// A kernel for 32 channels a block, one for 8 and one for 4: few channels get narrow blocks, or
// there would be too few of them.
template <class Params>
void launch_finalize_kernel(void (*wide)(Params), void (*narrow)(Params), void (*narrowest)(Params),
                            Params const& params, cudaStream_t stream) {
  int64_t const sm_count = device_info().sm_count;
  int const columns = params.channels >= 16 * sm_count  ? 32
                      : params.channels >= 4 * sm_count ? 8
                                                        : 4;
  dim3 const grid(static_cast<unsigned>(ceil_div(params.channels, columns)));
  launch_kernel(columns == 32  ? wide
                : columns == 8 ? narrow
                               : narrowest,
                grid, dim3(kFinalizeThreads), 0, stream, params);
}

}  // namespace cutlass_bn
