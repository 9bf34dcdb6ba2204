// Sums of each channel's tiles for the backward, where channels are adjacent ([rows, C] matrices,
// channels_last) or planes are small.
#pragma once

#include "batch_norm/after.cuh"
#include "batch_norm/block_walk.cuh"
#include "batch_norm/channel_affines.cuh"
#include "batch_norm/gradient_sums.cuh"
#include "batch_norm/relu_mask.cuh"
#include "common/launch.cuh"
#include "common/packet.cuh"

namespace cutlass_bn::batch_norm {

// Pointers as in GradientSumsParams.
template <class G, class T>
struct ColumnGradients {
  G const* dy;
  T const* x;
  T const* saved;
  T* dv;
  int64_t dy_row_stride;
  float2* partials;
  ChannelAffines maps;
};

template <class G, class T, int V, class Of>
__global__ void __launch_bounds__(kThreads, Of::blocks_per_sm(V))
    column_gradient_sums_kernel(__grid_constant__ ColumnGradients<G, T> const p,
                                __grid_constant__ Of const derivative,
                                __grid_constant__ ColumnTiling const t) {
  constexpr bool kWithX = Of::kWithX;
  constexpr int kLoads = Of::kLoads;
  constexpr bool kMasks = is_relu<typename Of::Activation> && sizeof(G) == 2 && V > 1;
  constexpr bool kMasksByX = kMasks && Of::kMakesV;
  constexpr bool kDvFirst = Of::kReadsSaved || kMasks;  // dv takes dy's place before it is summed
  wait_for_previous_kernel();

  // Thread (row, vector): rows row, row + block_rows, ... of the tile, V columns at a time. From
  // the last block to the first, as in planes/gradient_sums.cu.
  Block const block = block_at(gridDim.x - 1 - blockIdx.x, t.order);
  int const row = threadIdx.x / t.block_vectors, vector = threadIdx.x - row * t.block_vectors;
  int64_t const channels = p.maps.channels;
  int64_t const column = (int64_t(block.lane) * t.block_vectors + vector) * V;
  int64_t const first_channel = int64_t(block.lane) * t.block_channels;
  // The tiles of a group take steps of rows in turn.
  int const step = t.block_rows * kLoads;
  int64_t const first_tile = block.tile / t.group * t.group;
  int const tiles = static_cast<int>(min(int64_t(t.group), t.order.tiles - first_tile));
  int64_t const first_row = first_tile * t.rows_per_tile;
  int64_t const rows = min(int64_t(tiles) * t.rows_per_tile, t.rows - first_row);
  bool const active = row < t.block_rows && column < t.columns;
  int const row_bytes = int(sizeof(G) + (Of::kTensors - 1) * sizeof(T)) * V * t.block_vectors;
  int64_t const keep_rows = kept_bytes(blockIdx.x, t.order) / row_bytes * tiles;
  uint64_t const keep = evict_normal_policy(), stream = evict_first_policy();

  // First the means, in the end the threads' sums. What v is made with is read from shared memory
  // as it is used: in registers it would not fit. Of column vector * V + v it is at v *
  // block_vectors + vector, so that the threads of a warp read adjacent words.
  __shared__ GradientSums shared[kThreads * V];
  __shared__ float2 maps[Of::kMakesV ? kThreads * V : 1];  // gain, offset; or a relu_threshold()
  auto* const means = reinterpret_cast<float*>(shared);
  float mean[V] = {};
  if constexpr (kWithX) {
    int const block_columns = t.block_vectors * V;
    for (int c = threadIdx.x; c < block_columns; c += kThreads) {
      int64_t const channel = first_channel +
                              (t.inner == 1 ? c : int(unsigned(c) / unsigned(t.inner)));
      if (channel >= channels) break;
      int const at = c % V * t.block_vectors + c / V;
      if constexpr (Of::kMakesV) {
        Affine const map = p.maps.at(channel);
        means[at] = map.mean;
        if constexpr (kMasksByX) {
          maps[at].x = __uint_as_float(relu_threshold<T>(map));
        } else {
          maps[at] = {map.gain, map.shift};
        }
      } else {
        means[at] = p.maps.mean_at(channel);
      }
    }
    __syncthreads();
#pragma unroll
    for (int v = 0; v < V; ++v) mean[v] = active ? means[v * t.block_vectors + vector] : 0.f;
  }
  ReluThreshold passes[kMasksByX ? V / 2 : 1];
  if constexpr (kMasksByX) {
#pragma unroll
    for (int v = 0; v < V; v += 2) {
      int const at = v * t.block_vectors + (active ? vector : 0);
      passes[v / 2] = of_pair(__float_as_uint(maps[at].x),
                              __float_as_uint(maps[at + t.block_vectors].x));
    }
  }

  GradientSums sums[V];
  if (active) {
    Packets<G, V> gradients[kLoads];
    Packet<T, V> values[kLoads], saved[kLoads];
    int64_t const stride = t.block_rows * t.row_stride, dy_stride = t.block_rows * p.dy_row_stride;
    int64_t const apart = int64_t(tiles) * step;
    int64_t r = (block.tile - first_tile) * step + row;  // in the group
    int64_t from = (first_row + r) * t.row_stride + column,
            dy_from = (first_row + r) * p.dy_row_stride + column;
    auto const load = [&](int u, uint64_t policy) {
      if constexpr (Of::kReadsSaved) {
        // With default caching: beside stores of dv hints cost a tenth.
        gradients[u].load(p.dy + dy_from + u * dy_stride);
        if (kWithX) values[u].load(p.x + from + u * stride);
        saved[u].load(p.saved + from + u * stride);
      } else {
        gradients[u].load(p.dy + dy_from + u * dy_stride, policy);
        if (kWithX) values[u].load(p.x + from + u * stride, policy);
      }
    };
    auto const dv_of = [&](int u, int v, float dy, float2 map) {
      return derivative(dy, kWithX ? values[u][v] - mean[v] : 0.f, map.x, map.y,
                        Of::kReadsSaved ? saved[u][v] : 0.f);
    };
    auto const map_of = [&](int v) {
      if constexpr (Of::kMakesV) {
        return maps[v * t.block_vectors + vector];
      } else {
        return float2{};
      }
    };
    // count: vectors that are there; of the others dy is 0, which adds nothing.
    auto const add_step = [&](int count) {
      if constexpr (kDvFirst) {  // as it is stored
#pragma unroll
        for (int u = 0; u < kLoads; ++u) {
          Packet<G, V>& gradient = gradients[u].part[0];
          if constexpr (kMasks) {
#pragma unroll
            for (int i = 0; i < V / 2; ++i) {
              gradient.word[i] &= kMasksByX ? passes[i].template passes<T>(values[u].word[i])
                                            : passes_by_output<T>(saved[u].word[i]);
            }
          } else {
            gradient.transform([&](int v, float dy) { return dv_of(u, v, dy, map_of(v)); });
          }
          if (Of::kReadsSaved && p.dv != nullptr && u < count)
            gradient.store(p.dv + from + u * stride);
        }
      }
#pragma unroll
      for (int v = 0; v < V; ++v) {
        GradientSums step;
        float2 const map = kDvFirst ? float2{} : map_of(v);
#pragma unroll
        for (int u = 0; u < kLoads; ++u) {
          float const dv = kDvFirst ? gradients[u][v] : dv_of(u, v, gradients[u][v], map);
          step.dy += dv;
          if (kWithX) step.product = fmaf(dv, values[u][v] - mean[v], step.product);
        }
        add(sums[v], step);
      }
    };
    for (; r + step - t.block_rows < rows;
         r += apart, from += apart * t.row_stride, dy_from += apart * p.dy_row_stride) {
      uint64_t const policy = r >= rows - keep_rows ? keep : stream;
#pragma unroll
      for (int u = 0; u < kLoads; ++u) load(u, policy);
      add_step(kLoads);
    }
    if (r < rows) {
      int const left = static_cast<int>((rows - r + t.block_rows - 1) / t.block_rows);
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        gradients[u] = {}, values[u] = {}, saved[u] = {};
        if (u < left) load(u, keep);
      }
      add_step(left);
    }
  }

  if constexpr (kWithX) __syncthreads();  // all have read their means
  // Down the rows of the block, in a tree: at each level the upper half of the rows hands its sums
  // to the lower half.
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

  allow_next_kernel();  // that which finalises: earlier it would only wait
  float2* const out = p.partials + block.tile * channels + first_channel;
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
