// dx = (dy - mean_dy - (x - mean) * slope) * gain + shift, one channel's part of the backward
// transform.
#pragma once

#include "batch_norm/params.h"

namespace cutlass_bn::batch_norm {

struct GradientMap {
  float mean, mean_dy, slope, gain, shift;

  // Both means first, as in the forward: multiplied out, large ones would cancel.
  __device__ __forceinline__ float operator()(float dy, float x) const {
    return fmaf(fmaf(mean - x, slope, dy - mean_dy), gain, shift);
  }
};

// Volatile: stays behind wait_for_previous_kernel().
__device__ __forceinline__ GradientMap load_map(GradientMaps const& maps, int64_t channel) {
  GradientMap m;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(m.mean), "=f"(m.mean_dy), "=f"(m.slope), "=f"(m.gain)
               : "l"(maps.main + channel));
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(m.shift) : "l"(maps.shift + channel));
  return m;
}

__device__ __forceinline__ float load_offset(GradientMaps const& maps, int64_t channel) {
  float offset;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(offset) : "l"(maps.offset + channel));
  return offset;
}

__device__ __forceinline__ uint32_t load_threshold(GradientMaps const& maps, int64_t channel) {
  uint32_t threshold;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(threshold) : "l"(maps.threshold + channel));
  return threshold;
}

}  // namespace cutlass_bn::batch_norm
