// y = (x - mean) * (gamma * invstd) + beta where channels are adjacent (channels_last, [N, C]) or
// planes are small. Short blocks in the order of memory, as in planes/transform.cu, but long enough
// to pay for their channels' parameters.
#include "batch_norm/channel_affines.cuh"
#include "batch_norm/kernels.h"
#include "batch_norm/transform_walk.cuh"
#include "common/launch.cuh"
#include "common/packet.cuh"

namespace cutlass_bn::batch_norm {
namespace {

template <class T, int V>
__global__ void __launch_bounds__(kThreads, V == 8 ? 4 : 6)
    column_transform_kernel(T const* x, T* y, __grid_constant__ ChannelAffines const params,
                            __grid_constant__ ColumnSegments const s) {
  __shared__ float mean[kMaxBlockChannels], gain[kMaxBlockChannels], shift[kMaxBlockChannels];
  wait_for_previous_kernel();
  allow_next_kernel();

  uint32_t const tile = blockIdx.x / s.lanes, lane = blockIdx.x - tile * s.lanes;
  int64_t const first_channel = int64_t(lane) * s.block_channels;
  for (int c = threadIdx.x; c < s.block_channels && first_channel + c < s.channels; c += kThreads) {
    Affine const map = params.at(first_channel + c);
    mean[c] = map.mean, gain[c] = map.gain, shift[c] = map.shift;
  }
  __syncthreads();

  int const thread_row = threadIdx.x / s.block_vectors,
            vector = threadIdx.x - thread_row * s.block_vectors;
  int64_t const column = (int64_t(lane) * s.block_vectors + vector) * V;
  if (thread_row >= s.block_rows || column >= s.columns) return;
  Affine map[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    uint32_t const c = s.channel_of(vector * V + v);
    map[v] = {mean[c], gain[c], shift[c]};
  }
  int64_t row = int64_t(tile) * s.rows_per_block() + thread_row;
#pragma unroll 1
  for (int batch = 0; batch < kTransformBatches;
       ++batch, row += s.block_rows * kTransformAccesses) {
    Packet<T, V> values[kTransformAccesses];
#pragma unroll
    for (int i = 0; i < kTransformAccesses; ++i) {
      int64_t const r = row + i * s.block_rows;
      if (r < s.rows) values[i].load(x + r * s.row_stride + column);
    }
#pragma unroll
    for (int i = 0; i < kTransformAccesses; ++i) {
      int64_t const r = row + i * s.block_rows;
      if (r >= s.rows) return;
      values[i].transform([&](int v, float value) { return map[v](value); });
      values[i].store(y + r * s.row_stride + column);
    }
  }
}

}  // namespace

void columns::launch_transform(TransformParams const& p, cudaStream_t stream) {
  dispatch_vector(p.dtype, p.view, is_aligned(p.x) && is_aligned(p.y), [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    constexpr int V = decltype(width)::value;
    ColumnSegments const segments = cut_columns(p.view, V);
    launch_kernel(column_transform_kernel<T, V>, dim3(static_cast<unsigned>(segments.blocks())),
                  dim3(kThreads), 0, stream, static_cast<T const*>(p.x), static_cast<T*>(p.y),
                  ChannelAffines(p), segments);
  });
}

}  // namespace cutlass_bn::batch_norm
