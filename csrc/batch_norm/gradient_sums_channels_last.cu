// Sums of each channel's tiles for the backward, where channels are adjacent (channels_last, [N, C]) or planes are small.
#include "batch_norm/block_walk.cuh"
#include "batch_norm/gradient_sums.cuh"
#include "batch_norm/kernels.h"
#include "common/launch.cuh"
#include "common/packet.cuh"

namespace cutlass_bn::batch_norm {
namespace {

// Without x only dy is summed.
template <class T, int V, bool kWithX>
__global__ void __launch_bounds__(kThreads, column_blocks_per_sm(V))
    column_gradient_sums_kernel(T const* dy, T const* x, ChannelVector const mean_of_x, float2* partials, int64_t channels,
                                __grid_constant__ ColumnTiling const t) {
  constexpr int kLoads = kGradientLoads<kWithX>;
  wait_for_previous_kernel();
  allow_next_kernel();

  // Thread (row, vector): rows row, row + block_rows, ... of the tile, V columns at a time. From the last block to the first, as in
  // gradient_sums_nchw.cu.
  Block const block = block_at(gridDim.x - 1 - blockIdx.x, t.order);
  int const row = threadIdx.x / t.block_vectors, vector = threadIdx.x - row * t.block_vectors;
  int64_t const column = (int64_t(block.lane) * t.block_vectors + vector) * V;
  int64_t const first_channel = int64_t(block.lane) * t.block_channels;
  int64_t const first_row = block.tile * t.rows_per_tile;
  int const rows = static_cast<int>(min(int64_t(t.rows_per_tile), t.rows - first_row));
  bool const active = row < t.block_rows && column < t.columns;
  int const row_bytes = int(sizeof(T)) * V * t.block_vectors * (kWithX ? 2 : 1);
  int const keep_rows = static_cast<int>(kept_bytes(blockIdx.x, t.order) / row_bytes);
  uint64_t const keep = evict_normal_policy(), stream = evict_first_policy();

  float mean[V] = {};
  GradientSums sums[V];
  if (active) {
    if (kWithX) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        unsigned const within = vector * V + v;  // a column of the block
        mean[v] = mean_of_x.load(first_channel + (t.inner == 1 ? within : within / unsigned(t.inner)));
      }
    }
    Packet<T, V> gradients[kLoads], values[kLoads];
    auto const add_step = [&] {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        GradientSums step;
#pragma unroll
        for (int u = 0; u < kLoads; ++u) {
          step.dy += gradients[u][v];
          if (kWithX) step.product = fmaf(gradients[u][v], values[u][v] - mean[v], step.product);
        }
        add(sums[v], step);
      }
    };
    int64_t const stride = t.block_rows * t.row_stride;
    int64_t from = (first_row + row) * t.row_stride + column;
    int const step = t.block_rows * kLoads;
    int r = row;
    for (; r + step - t.block_rows < rows; r += step, from += kLoads * stride) {
      uint64_t const policy = r >= rows - keep_rows ? keep : stream;
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        gradients[u].load(dy + from + u * stride, policy);
        if (kWithX) values[u].load(x + from + u * stride, policy);
      }
      add_step();
    }
    if (r < rows) {
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        gradients[u] = {}, values[u] = {};  // a gradient of 0 adds nothing
        if (r + u * t.block_rows < rows) {
          gradients[u].load(dy + from + u * stride, keep);
          if (kWithX) values[u].load(x + from + u * stride, keep);
        }
      }
      add_step();
    }
  }

  // Down the rows of the block, in a tree: at each level the upper half of the rows hands its sums to the lower half.
  __shared__ GradientSums shared[kThreads * V];
  GradientSums* const mine = shared + threadIdx.x * V;
  for (int alive = t.block_rows; alive > 1;) {
    int const half = (alive + 1) / 2;
    if (active && row >= half && row < alive) {
#pragma unroll
      for (int v = 0; v < V; ++v) mine[v] = sums[v];
    }
    __syncthreads();
    if (active && row + half < alive) {
      GradientSums const* const other = mine + half * t.block_vectors * V;
#pragma unroll
      for (int v = 0; v < V; ++v) add(sums[v], other[v]);
    }
    alive = half;
  }

  float2* const out = partials + block.tile * channels + first_channel;
  if (t.inner == 1) {
    if (active && row == 0) {
#pragma unroll
      for (int v = 0; v < V; ++v) out[vector * V + v] = {sums[v].dy, sums[v].product};
    }
    return;
  }
  // A channel is `inner` adjacent columns: one warp adds them.
  __syncthreads();
  if (active && row == 0) {
#pragma unroll
    for (int v = 0; v < V; ++v) mine[v] = sums[v];
  }
  __syncthreads();
  int const inner = static_cast<int>(t.inner), lane = threadIdx.x % 32;
  int const block_channels = static_cast<int>(min(int64_t(t.block_channels), channels - first_channel));
  for (int channel = threadIdx.x / 32; channel < block_channels; channel += kThreads / 32) {
    GradientSums total;
    for (int i = lane; i < inner; i += 32) add(total, shared[channel * inner + i]);
    total = add_warp(total);
    if (lane == 0) out[channel] = {total.dy, total.product};
  }
}

}  // namespace

void launch_column_gradient_sums(GradientSumsParams const& p, cudaStream_t stream) {
  dispatch_vector(p.dtype, p.view, is_aligned(p.dy) && is_aligned(p.x), [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    constexpr int V = decltype(width)::value;
    int const tensors = p.x == nullptr ? 1 : 2;
    ColumnTiling const tiling = tile_columns(p.view, p.rows_per_tile, V, tensors * static_cast<int>(sizeof(T)));
    auto const launch = [&](auto kernel) {
      launch_kernel(kernel, dim3(static_cast<unsigned>(tiling.order.blocks())), dim3(kThreads), 0, stream,
                    static_cast<T const*>(p.dy), static_cast<T const*>(p.x), p.mean, p.partials, p.view.channels, tiling);
    };
    p.x == nullptr ? launch(column_gradient_sums_kernel<T, V, false>) : launch(column_gradient_sums_kernel<T, V, true>);
  });
}

}  // namespace cutlass_bn::batch_norm
