// Moments of each channel's tiles where channels are adjacent (channels_last, [rows, C] matrices)
// or planes are small.
#include "batch_norm/block_walk.cuh"
#include "batch_norm/kernels.h"
#include "batch_norm/tile_moments.cuh"
#include "common/launch.cuh"
#include "common/packet.cuh"

namespace cutlass_bn::batch_norm {
namespace {

template <class T, int V>
__global__ void __launch_bounds__(kThreads, column_blocks_per_sm(V))
    column_stats_kernel(T const* x, TileMomentsOut const out, int64_t channels,
                        __grid_constant__ ColumnTiling const t) {
  wait_for_previous_kernel();

  // Thread (row, vector): rows row, row + block_rows, ... of the tile, V columns at a time.
  // From the last block to the first, as the transform starts with the first: it finds in L2 what
  // was read last here.
  Block const block = block_at(gridDim.x - 1 - blockIdx.x, t.order);
  int const row = threadIdx.x / t.block_vectors, vector = threadIdx.x - row * t.block_vectors;
  int64_t const column = (int64_t(block.lane) * t.block_vectors + vector) * V;
  int64_t const first_row = block.tile * t.rows_per_tile;
  int const rows = static_cast<int>(min(int64_t(t.rows_per_tile), t.rows - first_row));
  bool const active = row < t.block_rows && column < t.columns;
  int const keep_rows = static_cast<int>(kept_bytes(blockIdx.x, t.order) /
                                         (int(sizeof(T)) * V * t.block_vectors));
  uint64_t const keep = evict_normal_policy(), stream = evict_first_policy();

  TileMoments moments[V];
  Packet<T, V> loaded[kUnroll] = {};
  float count = 0.f;  // of each column: they share the weights of their merges
  auto const absorb_all = [&](int values, auto const& chunk_moments) {
    float const before = count;
    count += float(values);
    float const weight = __fdividef(float(values), count);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (before == 0.f) {
        moments[v] = chunk_moments(v);
      } else {
        absorb(moments[v], chunk_moments(v), weight, before * weight);
      }
    }
  };
  if (active) {
    int64_t const stride = t.block_rows * t.row_stride;
    T const* from = x + (first_row + row) * t.row_stride + column;
    int const step = t.block_rows * kUnroll;
    int r = row;
    for (; r + step - t.block_rows < rows; r += step, from += kUnroll * stride) {
      uint64_t const policy = r >= rows - keep_rows ? keep : stream;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) loaded[u].load(from + u * stride, policy);
      absorb_all(kUnroll,
                 [&](int v) { return moments_of<kUnroll>([&](int u) { return loaded[u][v]; }); });
    }
    if (r < rows) {
      int const left = (rows - r + t.block_rows - 1) / t.block_rows;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        loaded[u] = {};
        if (u < left) loaded[u].load(from + u * stride, keep);
      }
      absorb_all(left, [&](int v) {
        return moments_of<kUnroll>([&](int u) { return loaded[u][v]; }, left);
      });
    }
#pragma unroll
    for (int v = 0; v < V; ++v) moments[v].count = count;
  }

  // Down the rows of the block, in a tree: at each level the upper half of the rows hands its
  // moments to the lower half.
  __shared__ TileMoments shared[kThreads * V];
  TileMoments* const mine = shared + threadIdx.x * V;
  for (int alive = t.block_rows; alive > 1;) {
    int const half = (alive + 1) / 2;
    if (active && row >= half && row < alive) {
#pragma unroll
      for (int v = 0; v < V; ++v) mine[v] = moments[v];
    }
    __syncthreads();
    if (active && row + half < alive) {
      TileMoments const* const other = mine + half * t.block_vectors * V;
#pragma unroll
      for (int v = 0; v < V; ++v) moments[v] = merge(moments[v], other[v]);
    }
    alive = half;
  }

  allow_next_kernel();  // that which finalises: earlier it would only wait
  int64_t const first_channel = int64_t(block.lane) * t.block_channels;
  int64_t const first = block.tile * channels + first_channel;  // of the output
  if (t.inner == 1) {
    if (active && row == 0) {
#pragma unroll
      for (int v = 0; v < V; ++v) report(out, first + vector * V + v, moments[v]);
    }
    return;
  }
  // A channel is `inner` adjacent columns: one warp merges them.
  __syncthreads();
  if (active && row == 0) {
#pragma unroll
    for (int v = 0; v < V; ++v) mine[v] = moments[v];
  }
  __syncthreads();
  int const inner = static_cast<int>(t.inner), lane = threadIdx.x % 32;
  int const block_channels = static_cast<int>(
      min(int64_t(t.block_channels), channels - first_channel));
  for (int channel = threadIdx.x / 32; channel < block_channels; channel += kThreads / 32) {
    TileMoments total;
    for (int i = lane; i < inner; i += 32) total = merge(total, shared[channel * inner + i]);
    total = merge_warp(total);
    if (lane == 0) report(out, first + channel, total);
  }
}

}  // namespace

void columns::launch_stats(StatsParams const& p, cudaStream_t stream) {
  dispatch_vector(p.dtype, p.view, is_aligned(p.x), [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    constexpr int V = decltype(width)::value;
    ColumnTiling const tiling = tile_columns(p.view, p.rows_per_tile, V, sizeof(T));
    launch_kernel(column_stats_kernel<T, V>, dim3(static_cast<unsigned>(tiling.order.blocks())),
                  dim3(kThreads), 0, stream, static_cast<T const*>(p.x), p.out, p.view.channels,
                  tiling);
  });
}

}  // namespace cutlass_bn::batch_norm
