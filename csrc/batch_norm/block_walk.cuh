// Device side of tiling.h.
#pragma once

#include "batch_norm/tiling.h"

namespace cutlass_bn::batch_norm {

struct Block {
  int64_t tile;
  uint32_t lane;
};

__device__ __forceinline__ Block block_at(uint32_t index, BlockOrder const& order) {
  uint32_t const tile = index / order.lanes;
  return {tile, index - tile * order.lanes};
}

// Bytes at the end of block `index` that are among the last that its slot reads in this pass.
__device__ __forceinline__ int64_t kept_bytes(uint32_t index, BlockOrder const& order) {
  uint32_t const later_waves = (gridDim.x - 1 - index) / order.slots;
  return order.kept_per_slot - later_waves * order.bytes_per_tile;
}

// Addresses the vectors of one channel's tile by their number within the tile.
template <int V>
struct PlaneWalk {
  int64_t start;   // elements from the tensor's first to vector 0
  int64_t gap;     // elements from the end of a plane to this channel's next plane
  uint32_t first;  // vector 0's number within its plane
  FastDivisor plane;

  __device__ __forceinline__ PlaneWalk(PlaneTiling const& t, int64_t tile, uint32_t channel)
      : gap(t.outer_stride - t.inner), plane(t.plane) {
    int64_t const vector = tile * t.vectors_per_tile;
    int64_t const outer = vector / t.vectors_per_plane;
    int64_t const within = vector - outer * t.vectors_per_plane;
    start = outer * t.outer_stride + channel * t.inner + within * V;
    // As many vectors before the next border as there are. A plane longer than kLongPlane counts as
    // its last kLongPlane vectors: a tile can't reach a second border, so that makes no difference.
    first = static_cast<uint32_t>(max(int64_t(0), plane.divisor - (t.vectors_per_plane - within)));
  }

  __device__ __forceinline__ int64_t offset(uint32_t vector) const {
    return start + (vector * V + plane.quotient(first + vector) * gap);
  }
};

}  // namespace cutlass_bn::batch_norm
