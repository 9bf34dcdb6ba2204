// y = (x - mean) * (weight * invstd) + bias where planes are large: NCHW.
#include "batch_norm/block_walk.cuh"
#include "batch_norm/channel_map.cuh"
#include "batch_norm/kernels.h"
#include "batch_norm/launch.h"
#include "batch_norm/packet.cuh"
#include "common/launch.cuh"

namespace cutlass_bn::batch_norm {
namespace {

template <class T, int V>
__global__ void __launch_bounds__(kThreads, kPlaneBlocksPerSm)
    plane_transform_kernel(T const* x, T* y, __grid_constant__ ChannelMapParams const maps, __grid_constant__ PlaneTiling const t) {
  constexpr int kStep = kThreads * kUnroll;
  wait_for_previous_kernel();
  allow_next_kernel();

  // Blocks and steps in the opposite order of the statistics: what those read last is still in L2.
  Block const block = block_at(gridDim.x - 1 - blockIdx.x, t.order);
  PlaneWalk<V> const walk(t, block.tile, block.lane);
  ChannelMap const map = maps.at(block.lane);
  int const count = static_cast<int>(min(int64_t(t.vectors_per_tile), t.vectors - block.tile * t.vectors_per_tile));
  uint64_t const stream = evict_first_policy();

  Packet<T, V> loaded[kUnroll];
  for (int step = (count - 1) / kStep * kStep; step >= 0; step -= kStep) {
    int const vector = step + static_cast<int>(threadIdx.x);
    bool const full = step + kStep <= count;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (full || vector + u * kThreads < count) loaded[u].load(x + walk.offset(vector + u * kThreads), stream);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (full || vector + u * kThreads < count) {
        loaded[u].transform([&](int, float v) { return map(v); });
        loaded[u].store(y + walk.offset(vector + u * kThreads));
      }
    }
  }
}

}  // namespace

void launch_plane_transform(TransformParams const& p, cudaStream_t stream) {
  dispatch_vector(p.dtype, p.view, is_aligned(p.x) && is_aligned(p.y), [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    constexpr int V = decltype(width)::value;
    PlaneTiling const tiling = tile_planes(p.view, choose_rows_per_tile(p.view, p.dtype), V, sizeof(T));
    launch_kernel(plane_transform_kernel<T, V>, dim3(static_cast<unsigned>(tiling.order.blocks())), dim3(kThreads), 0, stream,
                  static_cast<T const*>(p.x), static_cast<T*>(p.y), ChannelMapParams(p), tiling);
  });
}

}  // namespace cutlass_bn::batch_norm
