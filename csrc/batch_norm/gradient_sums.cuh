// Sums inside a tile: of dy, and of dy * (x - mean).
#pragma once

#include <cuda_runtime.h>

namespace cutlass_bn::batch_norm {

struct GradientSums {
  float dy = 0.f;
  float product = 0.f;
};

__device__ __forceinline__ void add(GradientSums& a, GradientSums const& b) {
  a.dy += b.dy;
  a.product += b.product;
}

// Over the first `width` lanes (a power of two) of a warp, all of whose lanes call it; lane 0 has
// the result.
__device__ __forceinline__ GradientSums add_warp(GradientSums s, int width = 32) {
  constexpr unsigned kAll = 0xffffffffu;
  for (int lanes = width / 2; lanes > 0; lanes /= 2) {
    add(s, {__shfl_down_sync(kAll, s.dy, lanes), __shfl_down_sync(kAll, s.product, lanes)});
  }
  return s;
}

// Over a block of Threads; thread 0 has the result.
template <int Threads>
__device__ __forceinline__ GradientSums add_block(GradientSums s) {
  constexpr int kWarps = Threads / 32;
  __shared__ GradientSums shared[kWarps];
  s = add_warp(s);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = s;
  __syncthreads();
  if (threadIdx.x >= 32) return {};
  return add_warp(threadIdx.x < kWarps ? shared[threadIdx.x] : GradientSums{}, kWarps);
}

}  // namespace cutlass_bn::batch_norm
