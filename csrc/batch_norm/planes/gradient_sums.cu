// Sums of each channel's tiles for the backward, where planes are large: NCHW.
#include "batch_norm/after.cuh"
#include "batch_norm/block_walk.cuh"
#include "batch_norm/channel_affines.cuh"
#include "batch_norm/gradient_sums.cuh"
#include "batch_norm/kernels.h"
#include "common/launch.cuh"
#include "common/packet.cuh"

namespace cutlass_bn::batch_norm {
namespace {

// Pointers as in GradientSumsParams.
template <class T>
struct PlaneGradients {
  T const* dy;
  T const* x;
  T const* saved;
  T* dv;
  float2* partials;
  ChannelAffines maps;
};

template <class T, int V, class Of>
__global__ void __launch_bounds__(kThreads, kPlaneBlocksPerSm)
    plane_gradient_sums_kernel(__grid_constant__ PlaneGradients<T> const p,
                               __grid_constant__ Of const derivative,
                               __grid_constant__ PlaneTiling const t) {
  constexpr bool kWithX = Of::kWithX;
  constexpr int kLoads = Of::kLoads;
  constexpr int kStep = kThreads * kLoads;
  wait_for_previous_kernel();

  // From the last block to the first: what was written last, dy's end, is still in L2, and the
  // transform, which starts with the first, finds there what was read last here.
  Block const block = block_at(gridDim.x - 1 - blockIdx.x, t.order);
  PlaneWalk<V> const walk(t, block.tile, block.lane);
  int const count = static_cast<int>(
      min(int64_t(t.vectors_per_tile), t.vectors - block.tile * t.vectors_per_tile));
  int64_t const keep_from = count -
                            kept_bytes(blockIdx.x, t.order) / (int(sizeof(T)) * V * Of::kTensors);
  uint64_t const keep = evict_normal_policy(), stream = evict_first_policy();
  Affine map{};
  if constexpr (Of::kMakesV) {
    map = p.maps.at(block.lane);
  } else if constexpr (kWithX) {
    map.mean = p.maps.mean_at(block.lane);
  }

  GradientSums sums;
  Packet<T, V> gradients[kLoads], values[kLoads], saved[kLoads];
  int64_t offsets[kLoads];
  auto const load = [&](int u, int vector, uint64_t policy) {
    int64_t const offset = offsets[u] = walk.offset(vector + u * kThreads);
    if constexpr (Of::kReadsSaved) {  // default caching, as in columns/gradient_sums.cuh
      gradients[u].load(p.dy + offset);
      if (kWithX) values[u].load(p.x + offset);
      saved[u].load(p.saved + offset);
    } else {
      gradients[u].load(p.dy + offset, policy);
      if (kWithX) values[u].load(p.x + offset, policy);
    }
  };
  auto const dv_of = [&](int u, int v, float dy) {
    return derivative(dy, kWithX ? values[u][v] - map.mean : 0.f, map.gain, map.shift,
                      Of::kReadsSaved ? saved[u][v] : 0.f);
  };
  // count: vectors that are there; of the others dy is 0, which adds nothing.
  auto const add_step = [&](int count) {
    GradientSums step;
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      if constexpr (Of::kReadsSaved) {  // dv as it is stored
        gradients[u].transform([&](int v, float dy) { return dv_of(u, v, dy); });
        if (p.dv != nullptr && u < count) gradients[u].store(p.dv + offsets[u]);
      }
      GradientSums vector;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        float const dv = Of::kReadsSaved ? gradients[u][v] : dv_of(u, v, gradients[u][v]);
        vector.dy += dv;
        if (kWithX) vector.product = fmaf(dv, values[u][v] - map.mean, vector.product);
      }
      add(step, vector);
    }
    add(sums, step);
  };
  int vector = threadIdx.x, step = 0;
  for (; step + kStep <= count; step += kStep, vector += kStep) {
    uint64_t const policy = step >= keep_from ? keep : stream;
#pragma unroll
    for (int u = 0; u < kLoads; ++u) load(u, vector, policy);
    add_step(kLoads);
  }
  if (vector < count) {
    int const left = (count - vector + kThreads - 1) / kThreads;
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      gradients[u] = {}, values[u] = {}, saved[u] = {};
      if (u < left) load(u, vector, keep);
    }
    add_step(left);
  }
  allow_next_kernel();  // the finalising kernel: earlier it would only wait
  sums = add_block<kThreads>(sums);
  if (threadIdx.x == 0)
    p.partials[block.tile * t.order.lanes + block.lane] = {sums.dy, sums.product};
}

}  // namespace

void planes::launch_gradient_sums(GradientSumsParams const& p, cudaStream_t stream) {
  GradientSource const& s = p.source;
  bool const aligned = is_aligned(s.dy) && is_aligned(s.x) && is_aligned(s.saved) &&
                       is_aligned(p.dv);
  dispatch_vector(s.dtype, s.view, aligned, [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    constexpr int V = decltype(width)::value;
    dispatch_derivative<V>(s, [&](auto derivative) {
      using Of = decltype(derivative);
      PlaneTiling const tiling = tile_planes(s.view, p.rows_per_tile, V,
                                             Of::kTensors * static_cast<int>(sizeof(T)));
      PlaneGradients<T> const gradients{static_cast<T const*>(s.dy),
                                        static_cast<T const*>(s.x),
                                        static_cast<T const*>(s.saved),
                                        static_cast<T*>(p.dv),
                                        p.partials,
                                        ChannelAffines(s.stats, s.view.channels, s.layer)};
      launch_kernel(plane_gradient_sums_kernel<T, V, Of>,
                    dim3(static_cast<unsigned>(tiling.order.blocks())), dim3(kThreads), 0, stream,
                    gradients, derivative, tiling);
    });
  });
}

}  // namespace cutlass_bn::batch_norm
