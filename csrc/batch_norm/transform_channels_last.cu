// y = (x - mean) * (weight * invstd) + bias where channels are adjacent (channels_last, [N, C]) or planes are small.
#include "batch_norm/block_walk.cuh"
#include "batch_norm/channel_map.cuh"
#include "batch_norm/kernels.h"
#include "batch_norm/launch.h"
#include "batch_norm/packet.cuh"
#include "common/launch.cuh"

namespace cutlass_bn::batch_norm {
namespace {

template <class T, int V>
__global__ void __launch_bounds__(kThreads, column_blocks_per_sm(V))
    column_transform_kernel(T const* x, T* y, __grid_constant__ ChannelMapParams const maps,
                            __grid_constant__ ColumnTiling const t) {
  wait_for_previous_kernel();
  allow_next_kernel();

  // The opposite order of the statistics, as in transform_nchw.cu.
  Block const block = block_at(gridDim.x - 1 - blockIdx.x, t.order);
  int const row = threadIdx.x / t.block_vectors, vector = threadIdx.x - row * t.block_vectors;
  int64_t const column = (int64_t(block.lane) * t.block_vectors + vector) * V;
  int64_t const first_row = block.tile * t.rows_per_tile;
  int const rows = static_cast<int>(min(int64_t(t.rows_per_tile), t.rows - first_row));
  if (row >= t.block_rows || column >= t.columns) return;

  ChannelMap map[V];
#pragma unroll
  for (int v = 0; v < V; ++v) map[v] = maps.at(t.inner == 1 ? column + v : (column + v) / t.inner);
  uint64_t const stream = evict_first_policy();
  int64_t const start = (first_row + row) * t.row_stride + column, stride = t.block_rows * t.row_stride;
  int const mine = (rows - row + t.block_rows - 1) / t.block_rows;  // not positive: none

  Packet<T, V> loaded[kUnroll];
  for (int i = (mine - 1) / kUnroll * kUnroll; i >= 0 && i < mine; i -= kUnroll) {
    int64_t const at = start + i * stride;
    bool const full = i + kUnroll <= mine;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (full || i + u < mine) loaded[u].load(x + at + u * stride, stream);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (full || i + u < mine) {
        loaded[u].transform([&](int i, float v) { return map[i](v); });
        loaded[u].store(y + at + u * stride);
      }
    }
  }
}

}  // namespace

void launch_column_transform(TransformParams const& p, cudaStream_t stream) {
  dispatch_vector(p.dtype, p.view, is_aligned(p.x) && is_aligned(p.y), [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    constexpr int V = decltype(width)::value;
    ColumnTiling const tiling = tile_columns(p.view, choose_rows_per_tile(p.view, p.dtype), V, sizeof(T));
    launch_kernel(column_transform_kernel<T, V>, dim3(static_cast<unsigned>(tiling.order.blocks())), dim3(kThreads), 0, stream,
                  static_cast<T const*>(p.x), static_cast<T*>(p.y), ChannelMapParams(p), tiling);
  });
}

}  // namespace cutlass_bn::batch_norm
