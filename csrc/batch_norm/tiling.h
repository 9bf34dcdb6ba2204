// How a ChannelView is cut into blocks of work by the statistics.
//
// Planes (inner is large): a block takes one channel's rows of one tile, V at a time, across plane
// borders. Columns (inner is small or 1): the view is a matrix [outer, channels * inner]; a thread
// owns V adjacent columns and walks down the rows, so no index arithmetic is left in its loop. A
// block covers whole channels.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "batch_norm/params.h"
#include "common/math.h"

namespace cutlass_bn::batch_norm {

inline constexpr int kThreads = 256;
inline constexpr int kUnroll = 8;           // independent accesses in flight per thread
inline constexpr int kLargestColumn = 256;  // planes of up to this many elements go to the column
                                            // kernels
inline constexpr int kColumnVectors = 64;  // adjacent vectors of a row that one block aims to cover
inline constexpr int kPlaneBlocksPerSm = 3;  // resident blocks that the plane kernels are compiled
                                             // for
inline constexpr int64_t kReusableBytes = int64_t(32) << 20;  // what stays in L2 from one pass to
                                                              // the next
inline constexpr int64_t kMaxRowsPerTile = int64_t(1) << 24;  // counts in a tile are exact in fp32
inline constexpr int64_t kLongPlane = 2 * kMaxRowsPerTile;    // vectors; a tile touches at most two
                                                              // such planes

// Vectors of each tensor in flight per thread where sums over dy, or over dy and others, are taken.
template <bool kWithOthers>
inline constexpr int kGradientLoads = kWithOthers ? kUnroll / 2 : kUnroll;

// kPlaneBlocksPerSm for the column kernels, whose threads hold the state of V channels. 64 KB or
// more are in flight per SM in any case.
constexpr int column_blocks_per_sm(int V) { return V == 8 ? 2 : V == 4 ? 3 : 4; }

// Division of n < 2^31 by a fixed divisor < 2^31: a multiplication, an addition and a shift.
struct FastDivisor {
  uint32_t multiplier = 1, shift = 0, divisor = 1;

  FastDivisor() = default;
  explicit FastDivisor(uint32_t d) : divisor(d) {
    while ((uint64_t(1) << shift) < d) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t(1) << 32) * ((uint64_t(1) << shift) - d)) / d +
                                       1);
  }

#ifdef __CUDACC__
  __device__ __forceinline__ uint32_t quotient(uint32_t n) const {
    return (__umulhi(n, multiplier) + n) >> shift;
  }
#endif
};

inline bool uses_columns(ChannelView const& view) { return view.inner <= kLargestColumn; }

// Whether rows can be accessed 16 bytes at a time, V elements each, given aligned base addresses.
inline bool is_vectorizable(ChannelView const& view, int V) {
  if (uses_columns(view))
    return view.outer_stride % V == 0 && (view.channels * view.inner) % V == 0;
  return view.inner % V == 0 && view.outer_stride % V == 0;
}

// Blocks are numbered tile * lanes + lane; a lane is a channel (planes) or a group of channels
// (columns).
struct BlockOrder {
  int64_t tiles = 0;
  uint32_t lanes = 1;
  int64_t bytes_per_tile = 0;  // that one block reads
  int64_t kept_per_slot = 0;  // bytes that a block slot reads last and that fit in L2 together with
                              // the other slots'
  int32_t slots = 1;          // blocks resident at a time

  int64_t blocks() const { return tiles * lanes; }
};

struct PlaneTiling {
  int64_t vectors = 0;  // per channel: outer * inner / V
  int32_t vectors_per_tile = 0;
  int64_t vectors_per_plane = 0;  // inner / V
  FastDivisor plane;              // vectors_per_plane, kLongPlane at most
  int64_t inner = 0, outer_stride = 0;
  BlockOrder order;
};

struct ColumnTiling {
  int64_t columns = 0;         // channels * inner
  int64_t rows = 0;            // outer
  int32_t rows_per_tile = 0;   // outer indices per tile
  int32_t group = 1;           // tiles whose blocks may take rows in turn: those that run together
  int32_t block_vectors = 1;   // vectors of a row that a block covers
  int32_t block_rows = 1;      // rows that it covers at a time: kThreads / block_vectors
  int32_t block_channels = 1;  // block_vectors * V / inner
  int64_t inner = 1, row_stride = 0;
  BlockOrder order;
};

// Vectors of a row per block: whole channels, whole vectors, near `aim`, and no nearly empty last
// block.
inline int32_t column_block_vectors(ChannelView const& view, int V, int64_t aim = kColumnVectors) {
  int64_t const unit_channels = V / std::gcd(int64_t(V), view.inner);
  int64_t const unit_vectors = unit_channels * view.inner / V;
  int64_t const units = ceil_div(view.channels, unit_channels);
  int64_t const units_per_block = std::max<int64_t>(1, aim / unit_vectors);
  return static_cast<int32_t>(ceil_div(units, ceil_div(units, units_per_block)) * unit_vectors);
}

// Rows per tile that fill the current device evenly. Depends on nothing but its arguments and the
// device.
int64_t choose_rows_per_tile(ChannelView const& view, DType dtype);
int64_t choose_gradient_rows_per_tile(ChannelView const& view, DType dtype, bool with_others);

// row_bytes: read per row, of all tensors.
PlaneTiling tile_planes(ChannelView const& view, int64_t rows_per_tile, int V, int row_bytes);
ColumnTiling tile_columns(ChannelView const& view, int64_t rows_per_tile, int V, int row_bytes);

}  // namespace cutlass_bn::batch_norm
