// dx of the training backward where channels are adjacent ([rows, C] matrices, channels_last) or
// planes are small. Blocks as in transform.cu.
#pragma once

#include <type_traits>

#include "batch_norm/gradient_map.cuh"
#include "batch_norm/transform_walk.cuh"
#include "common/activation_gradient.cuh"
#include "common/launch.cuh"
#include "common/packet.cuh"

namespace cutlass_bn::batch_norm {

// What comes after the normalised values, and the strides that follow from it. SameRows: all
// tensors have x's.
struct SameRows {
  static constexpr Activation kActivation = Activation::kNone;
};
template <Activation kOf>
struct ActivatedRows {
  static constexpr Activation kActivation = kOf;
  int64_t dy_row_stride, dx_row_stride;  // elements
};

template <class After, int V>
struct ColumnTransformShape {
  static constexpr bool kMatrix = !std::is_same_v<After, SameRows>;
  static constexpr bool kActivated = After::kActivation != Activation::kNone;
  static constexpr int kAccesses = kMatrix ? 2 * kTransformAccesses : kTransformAccesses;
  static constexpr int kBatches = kTransformAccesses * kTransformBatches / kAccesses;
  static constexpr int kBlocksPerSm = kMatrix ? 2 : V == 8 ? 3 : 4;
};

template <class G, class T, int V, class After>
__global__ void __launch_bounds__(kThreads, ColumnTransformShape<After, V>::kBlocksPerSm)
    column_gradient_transform_kernel(G const* dy, T const* x, T* dx,
                                     __grid_constant__ GradientMaps const maps,
                                     __grid_constant__ After const after,
                                     __grid_constant__ ColumnSegments const s) {
  using Shape = ColumnTransformShape<After, V>;
  __shared__ float mean[kMaxBlockChannels], mean_dy[kMaxBlockChannels], slope[kMaxBlockChannels],
      gain[kMaxBlockChannels], shift[kMaxBlockChannels],
      offset[Shape::kActivated ? kMaxBlockChannels : 1];
  // Of a matrix, column vector * V + v is at v * kTransformVectors + vector, so that the threads of
  // a warp read adjacent words.
  auto const place_of = [](uint32_t vector, uint32_t v) { return v * kTransformVectors + vector; };
  wait_for_previous_kernel();
  allow_next_kernel();

  uint32_t const tile = blockIdx.x / s.lanes, lane = blockIdx.x - tile * s.lanes;
  int64_t const first_channel = int64_t(lane) * s.block_channels;
  for (int c = threadIdx.x; c < s.block_channels && first_channel + c < s.channels; c += kThreads) {
    GradientMap const map = load_map(maps, first_channel + c);
    uint32_t const at = Shape::kMatrix ? place_of(c / V, c % V) : c;
    mean[at] = map.mean, mean_dy[at] = map.mean_dy, slope[at] = map.slope, gain[at] = map.gain,
    shift[at] = map.shift;
    if constexpr (Shape::kActivated) offset[at] = load_offset(maps, first_channel + c);
  }
  __syncthreads();

  int const thread_row = threadIdx.x / s.block_vectors,
            vector = threadIdx.x - thread_row * s.block_vectors;
  int64_t const column = (int64_t(lane) * s.block_vectors + vector) * V;
  if (thread_row >= s.block_rows || column >= s.columns) return;
  GradientMap map[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    uint32_t const at = Shape::kMatrix ? place_of(vector, v) : s.channel_of(vector * V + v);
    map[v] = {mean[at], mean_dy[at], slope[at], gain[at], shift[at]};
  }
  int64_t dy_row_stride = s.row_stride, dx_row_stride = s.row_stride;
  if constexpr (Shape::kMatrix)
    dy_row_stride = after.dy_row_stride, dx_row_stride = after.dx_row_stride;
  int64_t row = int64_t(tile) * s.rows_per_block() + thread_row;
#pragma unroll 1
  for (int batch = 0; batch < Shape::kBatches; ++batch, row += s.block_rows * Shape::kAccesses) {
    Packets<G, V> gradients[Shape::kAccesses];
    Packet<T, V> values[Shape::kAccesses];
#pragma unroll
    for (int i = 0; i < Shape::kAccesses; ++i) {
      int64_t const r = row + i * s.block_rows;
      if (r < s.rows) {
        gradients[i].load(dy + r * dy_row_stride + column);
        values[i].load(x + r * s.row_stride + column);
      }
    }
#pragma unroll
    for (int i = 0; i < Shape::kAccesses; ++i) {
      int64_t const r = row + i * s.block_rows;
      if (r >= s.rows) return;
      values[i].transform([&](int v, float value) {
        float const activated = Shape::kActivated ? fmaf(value - map[v].mean, map[v].gain,
                                                         offset[place_of(vector, v)])
                                                  : 0.f;
        return map[v](activation_gradient<After::kActivation>(gradients[i][v], activated), value);
      });
      values[i].store(dx + r * dx_row_stride + column);
    }
  }
}

}  // namespace cutlass_bn::batch_norm
