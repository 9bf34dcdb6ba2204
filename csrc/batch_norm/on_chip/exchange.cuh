// How the blocks of a group exchange their sums of a channel: through memory, without a flag beside
// the data.
#pragma once

#include <cuda_runtime.h>

#include "batch_norm/on_chip/plan.h"

namespace cutlass_bn::batch_norm {

inline constexpr int kLanePartials = kMaxGroup / 32;

// A partial travels as one access of 16 bytes: who sees that .w is not 0 sees all of it, without a
// second round trip to memory.
__device__ __forceinline__ void publish(float4* to, float4 const& v) {
  asm volatile(
      "{\n"
      ".reg .b64 low, high;\n"
      ".reg .b128 all;\n"
      "mov.b64 low, {%1, %2};\n"
      "mov.b64 high, {%3, %4};\n"
      "mov.b128 all, {low, high};\n"
      "st.relaxed.gpu.global.b128 [%0], all;\n"
      "}\n" ::"l"(to),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
      : "memory");
}

__device__ __forceinline__ float4 poll(float4 const* from) {
  float4 v;
  asm volatile(
      "{\n"
      ".reg .b64 low, high;\n"
      ".reg .b128 all;\n"
      "ld.relaxed.gpu.global.b128 all, [%4];\n"
      "mov.b128 {low, high}, all;\n"
      "mov.b64 {%0, %1}, low;\n"
      "mov.b64 {%2, %3}, high;\n"
      "}\n"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "l"(from)
      : "memory");
  return v;
}

// What `count` blocks have published, block b's in lane b % 32. Where there is none, .w is 0.
struct Published {
  float4 partial[kLanePartials];

  __device__ __forceinline__ void collect(float4 const* from, int count, int lane) {
    bool all;
    do {
      all = true;
#pragma unroll
      for (int i = 0; i < kLanePartials; ++i) {
        partial[i] = lane + 32 * i < count ? poll(from + lane + 32 * i) : float4{};
      }
#pragma unroll
      for (int i = 0; i < kLanePartials; ++i)
        all = all && (lane + 32 * i >= count || partial[i].w != 0.f);
    } while (!__all_sync(0xffffffffu, all));
  }
};

}  // namespace cutlass_bn::batch_norm
