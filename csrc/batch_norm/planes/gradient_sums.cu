// Sums of each channel's tiles for the backward, where planes are large: NCHW.
#include "batch_norm/block_walk.cuh"
#include "batch_norm/gradient_sums.cuh"
#include "batch_norm/kernels.h"
#include "common/launch.cuh"
#include "common/packet.cuh"

namespace cutlass_bn::batch_norm {
namespace {

// Without x only dy is summed.
template <class T, int V, bool kWithX>
__global__ void __launch_bounds__(kThreads, kPlaneBlocksPerSm)
    plane_gradient_sums_kernel(T const* dy, T const* x, ChannelVector const mean_of_x,
                               float2* partials, __grid_constant__ PlaneTiling const t) {
  constexpr int kLoads = kGradientLoads<kWithX>;
  constexpr int kStep = kThreads * kLoads;
  wait_for_previous_kernel();
  allow_next_kernel();

  // From the last block to the first: what was written last, dy's end, is still in L2, and the
  // transform, which starts with the first, finds there what was read last here.
  Block const block = block_at(gridDim.x - 1 - blockIdx.x, t.order);
  PlaneWalk<V> const walk(t, block.tile, block.lane);
  int const count = static_cast<int>(
      min(int64_t(t.vectors_per_tile), t.vectors - block.tile * t.vectors_per_tile));
  int64_t const keep_from = count - kept_bytes(blockIdx.x, t.order) /
                                        (int(sizeof(T)) * V * (kWithX ? 2 : 1));
  uint64_t const keep = evict_normal_policy(), stream = evict_first_policy();
  float const mean = kWithX ? mean_of_x.load(block.lane) : 0.f;

  GradientSums sums;
  Packet<T, V> gradients[kLoads], values[kLoads];
  auto const add_step = [&] {
    GradientSums step;
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      GradientSums vector;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        vector.dy += gradients[u][v];
        if (kWithX) vector.product = fmaf(gradients[u][v], values[u][v] - mean, vector.product);
      }
      add(step, vector);
    }
    add(sums, step);
  };
  int vector = threadIdx.x, step = 0;
  for (; step + kStep <= count; step += kStep, vector += kStep) {
    uint64_t const policy = step >= keep_from ? keep : stream;
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      int64_t const offset = walk.offset(vector + u * kThreads);
      gradients[u].load(dy + offset, policy);
      if (kWithX) values[u].load(x + offset, policy);
    }
    add_step();
  }
  if (vector < count) {
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      gradients[u] = {}, values[u] = {};  // a gradient of 0 adds nothing
      if (vector + u * kThreads < count) {
        int64_t const offset = walk.offset(vector + u * kThreads);
        gradients[u].load(dy + offset, keep);
        if (kWithX) values[u].load(x + offset, keep);
      }
    }
    add_step();
  }
  sums = add_block<kThreads>(sums);
  if (threadIdx.x == 0) partials[block.tile * t.order.lanes + block.lane] = {sums.dy, sums.product};
}

}  // namespace

void planes::launch_gradient_sums(GradientSumsParams const& p, cudaStream_t stream) {
  dispatch_vector(p.dtype, p.view, is_aligned(p.dy) && is_aligned(p.x), [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    constexpr int V = decltype(width)::value;
    int const tensors = p.x == nullptr ? 1 : 2;
    PlaneTiling const tiling = tile_planes(p.view, p.rows_per_tile, V,
                                           tensors * static_cast<int>(sizeof(T)));
    auto const launch = [&](auto kernel) {
      launch_kernel(kernel, dim3(static_cast<unsigned>(tiling.order.blocks())), dim3(kThreads), 0,
                    stream, static_cast<T const*>(p.dy), static_cast<T const*>(p.x), p.mean,
                    p.partials, tiling);
    };
    p.x == nullptr ? launch(plane_gradient_sums_kernel<T, V, false>)
                   : launch(plane_gradient_sums_kernel<T, V, true>);
  });
}

}  // namespace cutlass_bn::batch_norm
