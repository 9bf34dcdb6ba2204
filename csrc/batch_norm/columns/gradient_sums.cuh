// Sums of each channel's tiles for the backward, where channels are adjacent ([rows, C] matrices,
// channels_last) or planes are small.
#pragma once

#include <type_traits>

#include "batch_norm/block_walk.cuh"
#include "batch_norm/gradient_map.cuh"
#include "batch_norm/gradient_sums.cuh"
#include "common/activation_gradient.cuh"
#include "common/affine.cuh"
#include "common/launch.cuh"
#include "common/packet.cuh"

namespace cutlass_bn::batch_norm {

// What y is of the normalised values. SameValues: themselves.
struct SameValues {
  static constexpr Activation kActivation = Activation::kNone;
};
// An activation of v = (x - mean) * (gamma * scale * invstd) + beta; then dv = dy * act'(v) is
// summed in place of dy.
template <Activation kOf>
struct ActivatedValues {
  static constexpr Activation kActivation = kOf;
  float const* stats;  // [3, channels]
  ChannelVector scale, gamma, beta;
  int64_t dy_row_stride;  // elements; else dy's is that of x
};

// Without x only dy is summed.
template <class G, class T, int V, bool kWithX, class After>
__global__ void __launch_bounds__(kThreads, column_blocks_per_sm(V))
    column_gradient_sums_kernel(G const* dy, T const* x, ChannelVector const mean_of_x,
                                __grid_constant__ After const after, float2* partials,
                                int64_t channels, __grid_constant__ ColumnTiling const t) {
  constexpr bool kActivated = After::kActivation != Activation::kNone;
  constexpr int kLoads = kGradientLoads<kWithX>;
  wait_for_previous_kernel();
  allow_next_kernel();

  // Thread (row, vector): rows row, row + block_rows, ... of the tile, V columns at a time. From
  // the last block to the first, as in planes/gradient_sums.cu.
  Block const block = block_at(gridDim.x - 1 - blockIdx.x, t.order);
  int const row = threadIdx.x / t.block_vectors, vector = threadIdx.x - row * t.block_vectors;
  int64_t const column = (int64_t(block.lane) * t.block_vectors + vector) * V;
  int64_t const first_channel = int64_t(block.lane) * t.block_channels;
  int64_t const first_row = block.tile * t.rows_per_tile;
  int const rows = static_cast<int>(min(int64_t(t.rows_per_tile), t.rows - first_row));
  bool const active = row < t.block_rows && column < t.columns;
  int const row_bytes = int(sizeof(G) + (kWithX ? sizeof(T) : 0)) * V * t.block_vectors;
  int const keep_rows = static_cast<int>(kept_bytes(blockIdx.x, t.order) / row_bytes);
  uint64_t const keep = evict_normal_policy(), stream = evict_first_policy();

  // v's coefficients are read from here as they are used: kept in registers, they would not fit.
  // Column vector * V + v is at v * kColumnVectors + vector, so that the threads of a warp read
  // adjacent words.
  __shared__ float gain[kActivated ? V * kColumnVectors : 1],
      offset[kActivated ? V * kColumnVectors : 1];
  float mean[V] = {};
  if constexpr (kActivated) {
    ChannelVector const stats{after.stats, DType::kFloat32};
    for (int c = threadIdx.x; c < t.block_channels && first_channel + c < channels; c += kThreads) {
      int64_t const channel = first_channel + c;
      int const at = c % V * kColumnVectors + c / V;
      float const remainder = stats.load(channels + channel),
                  invstd = stats.load(2 * channels + channel);
      float const scale = after.scale.load_or(channel, 1.f),
                  gamma = after.gamma.load_or(channel, 1.f);
      gain[at] = gain_of(gamma, scale, invstd);
      offset[at] = shift_of(after.beta.load_or(channel, 0.f), gain[at], remainder);
    }
    __syncthreads();
  }
  GradientSums sums[V];
  if (active) {
    if (kWithX) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        unsigned const within = vector * V + v;  // a column of the block
        mean[v] = mean_of_x.load(first_channel +
                                 (t.inner == 1 ? within : within / unsigned(t.inner)));
      }
    }
    Packets<G, V> gradients[kLoads];
    Packet<T, V> values[kLoads];
    auto const add_step = [&] {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        int const at = kActivated ? v * kColumnVectors + vector : 0;
        GradientSums step;
#pragma unroll
        for (int u = 0; u < kLoads; ++u) {
          float const centred = kWithX ? values[u][v] - mean[v] : 0.f;
          float const activated = kActivated ? fmaf(centred, gain[at], offset[at]) : 0.f;
          float const dv = activation_gradient<After::kActivation>(gradients[u][v], activated);
          step.dy += dv;
          if (kWithX) step.product = fmaf(dv, centred, step.product);
        }
        add(sums[v], step);
      }
    };
    int64_t dy_row_stride = t.row_stride;
    if constexpr (!std::is_same_v<After, SameValues>) dy_row_stride = after.dy_row_stride;
    int64_t const stride = t.block_rows * t.row_stride, dy_stride = t.block_rows * dy_row_stride;
    int64_t from = (first_row + row) * t.row_stride + column,
            dy_from = (first_row + row) * dy_row_stride + column;
    int const step = t.block_rows * kLoads;
    int r = row;
    for (; r + step - t.block_rows < rows;
         r += step, from += kLoads * stride, dy_from += kLoads * dy_stride) {
      uint64_t const policy = r >= rows - keep_rows ? keep : stream;
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        gradients[u].load(dy + dy_from + u * dy_stride, policy);
        if (kWithX) values[u].load(x + from + u * stride, policy);
      }
      add_step();
    }
    if (r < rows) {
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        gradients[u] = {}, values[u] = {};  // a gradient of 0 adds nothing
        if (r + u * t.block_rows < rows) {
          gradients[u].load(dy + dy_from + u * dy_stride, keep);
          if (kWithX) values[u].load(x + from + u * stride, keep);
        }
      }
      add_step();
    }
  }

  // Down the rows of the block, in a tree: at each level the upper half of the rows hands its sums
  // to the lower half.
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
  int const block_channels = static_cast<int>(
      min(int64_t(t.block_channels), channels - first_channel));
  for (int channel = threadIdx.x / 32; channel < block_channels; channel += kThreads / 32) {
    GradientSums total;
    for (int i = lane; i < inner; i += 32) add(total, shared[channel * inner + i]);
    total = add_warp(total);
    if (lane == 0) out[channel] = {total.dy, total.product};
  }
}

}  // namespace cutlass_bn::batch_norm
