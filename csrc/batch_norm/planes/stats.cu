// Moments of each channel's tiles where planes are large: NCHW.
#include "batch_norm/block_walk.cuh"
#include "batch_norm/kernels.h"
#include "batch_norm/tile_moments.cuh"
#include "common/launch.cuh"
#include "common/packet.cuh"

namespace cutlass_bn::batch_norm {
namespace {

template <class T, int V>
__global__ void __launch_bounds__(kThreads, kPlaneBlocksPerSm)
    plane_stats_kernel(T const* x, TileMomentsOut const out,
                       __grid_constant__ PlaneTiling const t) {
  constexpr int kValues = kUnroll * V;
  constexpr int kChunk = kValues < 32 ? kValues : 32;  // as many as fit in registers as fp32
  constexpr int kStep = kThreads * kUnroll;
  wait_for_previous_kernel();

  // From the last block to the first, as the transform starts with the first: it finds in L2 what
  // was read last here.
  Block const block = block_at(gridDim.x - 1 - blockIdx.x, t.order);
  PlaneWalk<V> const walk(t, block.tile, block.lane);
  int const count = static_cast<int>(
      min(int64_t(t.vectors_per_tile), t.vectors - block.tile * t.vectors_per_tile));
  int64_t const keep_from = count - kept_bytes(blockIdx.x, t.order) / int(sizeof(T) * V);
  uint64_t const keep = evict_normal_policy(), stream = evict_first_policy();

  TileMoments moments;
  Packet<T, V> loaded[kUnroll] = {};
  auto const chunk = [&](int begin) {
    return [&, begin](int i) { return loaded[(begin + i) / V][(begin + i) % V]; };
  };
  int vector = threadIdx.x, step = 0;
  for (; step + kStep <= count; step += kStep, vector += kStep) {
    uint64_t const policy = step >= keep_from ? keep : stream;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      loaded[u].load(x + walk.offset(vector + u * kThreads), policy);
#pragma unroll
    for (int begin = 0; begin < kValues; begin += kChunk)
      moments = merge(moments, moments_of<kChunk>(chunk(begin)));
  }
  if (vector < count) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      loaded[u] = {};
      if (vector + u * kThreads < count)
        loaded[u].load(x + walk.offset(vector + u * kThreads), keep);
    }
    int const values = (count - vector + kThreads - 1) / kThreads * V;
#pragma unroll
    for (int begin = 0; begin < kValues; begin += kChunk) {
      if (begin < values)
        moments = merge(moments, moments_of<kChunk>(chunk(begin), min(values - begin, kChunk)));
    }
  }
  allow_next_kernel();  // the finalising kernel: earlier it would only wait
  moments = merge_block<kThreads>(moments);
  if (threadIdx.x == 0) report(out, block.tile * t.order.lanes + block.lane, moments);
}

}  // namespace

void planes::launch_stats(StatsParams const& p, cudaStream_t stream) {
  dispatch_vector(p.dtype, p.view, is_aligned(p.x), [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    constexpr int V = decltype(width)::value;
    PlaneTiling const tiling = tile_planes(p.view, p.rows_per_tile, V, sizeof(T));
    launch_kernel(plane_stats_kernel<T, V>, dim3(static_cast<unsigned>(tiling.order.blocks())),
                  dim3(kThreads), 0, stream, static_cast<T const*>(p.x), p.out, tiling);
  });
}

}  // namespace cutlass_bn::batch_norm
