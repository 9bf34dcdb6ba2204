// How the transforms, forward and backward, cut a ChannelView into short blocks in the order of
// memory.
#pragma once

#include "batch_norm/tiling.h"

namespace cutlass_bn::batch_norm {

inline constexpr int kTransformAccesses = 2;  // rows of a thread of the column transforms, in
                                              // flight together
inline constexpr int kTransformBatches = 4;   // so many times
inline constexpr int kTransformVectors = 32;  // adjacent vectors of a row that a block of the
                                              // column transforms aims to cover
inline constexpr int kMaxBlockChannels = kTransformVectors * 8;

// Large planes: vectors of the whole tensor, one a thread.
struct PlaneVectors {
  int64_t count;      // of the whole tensor
  int64_t per_plane;  // of one plane
  double planes_per_vector;
  FastDivisor channels;

  // The plane that a vector is in. Exact: the estimate is off by one at most, as vector numbers are
  // far below 2^53.
  __device__ __forceinline__ uint32_t plane_of(int64_t vector) const {
    int64_t const plane = static_cast<int64_t>(double(vector) * planes_per_vector);
    int64_t const within = vector - plane * per_plane;
    return static_cast<uint32_t>(within < 0 ? plane - 1 : within >= per_plane ? plane + 1 : plane);
  }

  __device__ __forceinline__ uint32_t channel_of(int64_t vector) const {
    uint32_t const plane = plane_of(vector);
    return plane - channels.quotient(plane) * channels.divisor;
  }

  int64_t blocks() const { return ceil_div(count, kThreads); }
};

inline PlaneVectors cut_planes(ChannelView const& view, int V) {
  int64_t const planes = view.outer * view.channels, per_plane = view.inner / V;
  PlaneVectors const vectors{planes * per_plane, per_plane, 1.0 / double(per_plane),
                             FastDivisor(static_cast<uint32_t>(view.channels))};
  CUTLASS_BN_CHECK(vectors.blocks() <= INT32_MAX && planes <= INT32_MAX, "input: too large, ",
                   planes, " planes of ", view.inner);
  return vectors;
}

// Adjacent channels or small planes: a block covers block_vectors vectors of rows_per_block() rows;
// a thread keeps its columns.
struct ColumnSegments {
  int64_t rows;     // outer
  int64_t columns;  // channels * inner
  int64_t channels;
  int64_t row_stride;
  uint32_t lanes;  // blocks side by side
  int32_t block_vectors;
  int32_t block_rows;
  int32_t block_channels;
  FastDivisor inner;

  __host__ __device__ int32_t rows_per_block() const {
    return block_rows * (kTransformAccesses * kTransformBatches);
  }
  int64_t blocks() const { return ceil_div(rows, rows_per_block()) * lanes; }

#ifdef __CUDACC__
  // Within the block: the channel of column `column`.
  __device__ __forceinline__ uint32_t channel_of(uint32_t column) const {
    return inner.divisor == 1 ? column : inner.quotient(column);
  }
#endif
};

inline ColumnSegments cut_columns(ChannelView const& view, int V) {
  ColumnSegments s{};
  s.rows = view.outer;
  s.columns = view.channels * view.inner;
  s.channels = view.channels;
  s.row_stride = view.outer_stride;
  s.block_vectors = column_block_vectors(view, V, kTransformVectors);
  s.block_rows = kThreads / s.block_vectors;
  s.block_channels = static_cast<int32_t>(s.block_vectors * V / view.inner);
  s.lanes = static_cast<uint32_t>(ceil_div(view.channels, s.block_channels));
  s.inner = FastDivisor(static_cast<uint32_t>(view.inner));
  CUTLASS_BN_CHECK(s.block_channels <= kMaxBlockChannels, "a block of ", s.block_channels,
                   " channels");
  CUTLASS_BN_CHECK(s.blocks() <= INT32_MAX, "input: too many blocks of work (", s.blocks(), ")");
  return s;
}

}  // namespace cutlass_bn::batch_norm
