// The arithmetic of the split: what becomes of a row's elements, given the row's largest magnitude.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "linear_bn/split/split.h"

namespace cutlass_bn::linear_bn {

// Magnitudes are compared as bits: in their order Inf and NaN are the largest, where fmaxf would
// lose a NaN.
__device__ __forceinline__ uint32_t magnitude(uint32_t float_bits) {
  return float_bits & 0x7fffffffu;
}

constexpr float kLargeShare = 1.f / (1 << 12), kLossyShare = 1.f / (1 << 20),
                kLargestLow = 1.f / (1 << 10);

struct RowScale {
  float scale,
      rest;  // together 2^exponent; the rest is not 1 where the row's maximum is below 2^-112
  int32_t exponent;
  bool zero;        // the planes are zero, whatever the elements
  uint32_t large;   // least magnitude of a large element; never that of a zero
  uint32_t census;  // where the planes are zero: what the census has
};

__device__ __forceinline__ RowScale row_scale(uint32_t largest_magnitude, int64_t k) {
  constexpr int kBias = 127, kLargestPower = 126;
  int const biased = static_cast<int>(largest_magnitude >> 23);  // floor(log2) + kBias; 0 where
                                                                 // denormal
  bool const finite = biased < 255;
  bool const zero = largest_magnitude == 0 || !finite;
  int const log2 = biased > 0 ? biased - kBias : -118 - __clz(static_cast<int>(largest_magnitude));
  int const exponent = zero ? 0 : 14 - log2;
  int const power = min(exponent, kLargestPower);
  uint32_t const large = __float_as_uint(__uint_as_float(largest_magnitude) * kLargeShare);
  return {__int_as_float((kBias + power) << 23),
          __int_as_float((kBias + exponent - power) << 23),
          exponent,
          zero,
          max(large, 1u),
          finite ? static_cast<uint32_t>(k) : kLossyRow};
}

// Whether hi and lo are further from x than kLossyShare of it, or lo is more of it than
// kLargestLow. scaled: x * 2^exponent, exact unless it underflows, and then hi and lo are 0.
__device__ __forceinline__ bool is_lossy(float x, float scaled, float hi, float lo) {
  constexpr float kLoUnit = 1.f / (1 << kSplitShift);
  float const share = fabsf(scaled);
  return (fabsf(fmaf(lo, kLoUnit, hi) - scaled) > share * kLossyShare) |
         (fabsf(scaled - hi) > share * kLargestLow) | ((scaled == 0.f) & (x != 0.f));
}

// In one access: the compiler takes the assignment of a uint4 apart in places.
template <int kWords>
__device__ __forceinline__ void store_words(void* p, uint32_t const (&word)[kWords]) {
  static_assert(kWords == 4 || kWords == 1);
  if constexpr (kWords == 4) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(word[0]), "r"(word[1]),
                 "r"(word[2]), "r"(word[3]));
  } else {
    *static_cast<uint32_t*>(p) = word[0];
  }
}

// Of two parts of a row.
__device__ __forceinline__ uint32_t add_census(uint32_t a, uint32_t b) {
  return ((a | b) & kLossyRow) | ((a + b) & ~kLossyRow);
}

// Of all lanes.
__device__ __forceinline__ uint32_t warp_census(uint32_t census) {
  constexpr unsigned kAllLanes = 0xffffffffu;
  return __reduce_or_sync(kAllLanes, census & kLossyRow) |
         __reduce_add_sync(kAllLanes, census & ~kLossyRow);
}

// kPairs pairs of adjacent elements of a row.
template <int kPairs>
struct SplitPacket {
  uint32_t hi[kPairs], lo[kPairs];

  // Returns what they add to the census: the number of large ones, and kLossyRow if either is
  // lossy.
  __device__ __forceinline__ uint32_t set(int pair, float x0, float x1, RowScale const& row) {
    constexpr float kLoScale = 1 << kSplitShift;
    // Not contracted with the differences below, so that a product that underflows is the same
    // number in both.
    float const scaled0 = __fmul_rn(__fmul_rn(x0, row.scale), row.rest),
                scaled1 = __fmul_rn(__fmul_rn(x1, row.scale), row.rest);
    __half2 const high = __floats2half2_rn(scaled0, scaled1);
    float2 const h = __half22float2(high);
    __half2 const low = __floats2half2_rn((scaled0 - h.x) * kLoScale, (scaled1 - h.y) * kLoScale);
    float2 const l = __half22float2(low);
    hi[pair] = *reinterpret_cast<uint32_t const*>(&high);
    lo[pair] = *reinterpret_cast<uint32_t const*>(&low);
    bool const lossy = is_lossy(x0, scaled0, h.x, l.x) | is_lossy(x1, scaled1, h.y, l.y);
    uint32_t const large = uint32_t(magnitude(__float_as_uint(x0)) >= row.large) +
                           (magnitude(__float_as_uint(x1)) >= row.large);
    return large | (lossy ? kLossyRow : 0);
  }

  // At element `offset` of the planes, aligned to the packet.
  __device__ __forceinline__ void store(SplitMatrix const& result, int64_t offset) const {
    __half* const to_hi = static_cast<__half*>(result.planes) + offset;
    store_words(to_hi, hi);
    store_words(to_hi + result.rows * result.ld, lo);
  }
};

}  // namespace cutlass_bn::linear_bn
