// An Op (transform_op.cuh) over a tensor whose channels are adjacent (channels_last, [N, C]) or
// whose planes are small. Short blocks in the order of memory, as in planes/map.cuh, but long
// enough to pay for their channels' coefficients.
#pragma once

#include "batch_norm/kernels.h"
#include "batch_norm/transform_op.cuh"
#include "batch_norm/transform_walk.cuh"
#include "common/launch.cuh"

namespace cutlass_bn::batch_norm {

template <int V, class Op>
__global__ void __launch_bounds__(kThreads, Op::kBlocksPerSm)
    column_map_kernel(__grid_constant__ Op const op, __grid_constant__ ColumnSegments const s) {
  constexpr int kFloats = Op::kCoefficients;
  constexpr int kAccesses = Op::kAccesses;
  constexpr int kBatches = kTransformAccesses * kTransformBatches / kAccesses;
  __shared__ float shared[kFloats][kMaxBlockChannels];
  wait_for_previous_kernel();
  allow_next_kernel();

  uint32_t const tile = blockIdx.x / s.lanes, lane = blockIdx.x - tile * s.lanes;
  int64_t const first_channel = int64_t(lane) * s.block_channels;
  // Where each column is a channel, channel vector * V + v is at v * kTransformVectors + vector, so
  // that the threads of a warp read adjacent words.
  bool const spread = Op::kMatrix || s.inner.divisor == 1;
  for (int c = threadIdx.x; c < s.block_channels && first_channel + c < s.channels; c += kThreads) {
    float coefficients[kFloats];
    op.coefficients(first_channel + c, coefficients);
    int const at = spread ? c % V * kTransformVectors + c / V : c;
#pragma unroll
    for (int i = 0; i < kFloats; ++i) shared[i][at] = coefficients[i];
  }
  __syncthreads();

  int const thread_row = threadIdx.x / s.block_vectors,
            vector = threadIdx.x - thread_row * s.block_vectors;
  int64_t const column = (int64_t(lane) * s.block_vectors + vector) * V;
  if (thread_row >= s.block_rows || column >= s.columns) return;
  float map[V][kFloats];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    uint32_t const at = spread ? v * kTransformVectors + vector : s.inner.quotient(vector * V + v);
#pragma unroll
    for (int i = 0; i < kFloats; ++i) map[v][i] = shared[i][at];
  }
  auto const of = [&](int v, int i) { return map[v][i]; };
  int64_t row = int64_t(tile) * s.rows_per_block() + thread_row;
#pragma unroll 1
  for (int batch = 0; batch < kBatches; ++batch, row += s.block_rows * kAccesses) {
    typename Op::Packets packets[kAccesses];
    auto const place = [&](int i) {
      int64_t const r = row + i * s.block_rows;
      return Place{r, column, r * s.row_stride + column};
    };
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      if (row + i * s.block_rows < s.rows) op.load(packets[i], place(i));
    }
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      if (row + i * s.block_rows >= s.rows) return;
      op.store(packets[i], place(i), of);
    }
  }
}

template <int V, class Op>
void launch_column_map(Op const& op, ChannelView const& view, cudaStream_t stream) {
  ColumnSegments const segments = cut_columns(view, V);
  launch_kernel(column_map_kernel<V, Op>, dim3(static_cast<unsigned>(segments.blocks())),
                dim3(kThreads), 0, stream, op, segments);
}

}  // namespace cutlass_bn::batch_norm
