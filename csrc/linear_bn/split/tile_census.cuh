// The census of a tile's rows, which says what of the split GEMM's output is recomputed.
#pragma once

#include <cstdint>

#include "linear_bn/split/split.h"

namespace cutlass_bn::linear_bn::exact {

// The fewest large elements of any of the rows, and of the lossy ones; kNone where there is none.
struct TileCensus {
  static constexpr int kNone = 1 << 30;  // more than any K
  int least = kNone, least_lossy = kNone;
};

// Whether a row of the one and a row of the other leave their product to the exact kernel.
__device__ __forceinline__ bool needs_exact(TileCensus const& rows, TileCensus const& columns,
                                            int k) {
  return rows.least_lossy + columns.least <= k || rows.least + columns.least_lossy <= k;
}

// Into tiles[i]: that of rows [(first + i) * kRows, (first + i + 1) * kRows), i < count. By the
// whole block; returns whether any row is lossy to the calling warp's knowledge. A warp reads
// kBatch tiles at a time: the time is that of L2's latency, as often as there are batches.
template <int kRows>
__device__ __forceinline__ bool take_census(uint32_t const* census, int64_t rows, int64_t first,
                                            int count, TileCensus* tiles) {
  constexpr unsigned kAllLanes = 0xffffffffu;
  constexpr int kLoads = kRows / 32, kBatch = 8;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  bool any = false;
  for (int batch = warp; batch < count; batch += warps * kBatch) {
    uint32_t read[kBatch][kLoads];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      int const tile = batch + b * warps;
      int64_t const row = (first + tile) * kRows + lane;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        read[b][i] = tile < count && row + i * 32 < rows ? census[row + i * 32] : TileCensus::kNone;
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      TileCensus tile;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        int const large = static_cast<int>(read[b][i] & ~kLossyRow);
        tile.least = min(tile.least, large);
        if (read[b][i] & kLossyRow) tile.least_lossy = min(tile.least_lossy, large);
      }
      tile.least = __reduce_min_sync(kAllLanes, tile.least);
      tile.least_lossy = __reduce_min_sync(kAllLanes, tile.least_lossy);
      any |= tile.least_lossy != TileCensus::kNone;
      if (lane == 0 && batch + b * warps < count) tiles[batch + b * warps] = tile;
    }
  }
  return any;
}

}  // namespace cutlass_bn::linear_bn::exact
