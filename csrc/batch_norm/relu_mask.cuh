// relu's derivative on packed half precision, two elements an instruction: whether v is positive is
// read from x or y as they are stored, and dv is dy under that mask.
#pragma once

#include <type_traits>

#include "common/affine.cuh"
#include "common/packet.cuh"

namespace cutlass_bn::batch_norm {

// 0xffff in each half where relu passes dy on, by y: it is not 0, or it is NaN.
template <class T>
__device__ __forceinline__ uint32_t passes_by_output(uint32_t y) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  uint32_t const zero = 0;
  return __hneu2_mask(reinterpret_cast<Pair const&>(y), reinterpret_cast<Pair const&>(zero));
}

// The same by x. v(x) is monotonic with all its roundings, so that there is a largest x that is not
// passed on: +-x > threshold says the same as v > 0, for every x. Where v is NaN dy passes, as
// comparisons here are true of NaN.
struct ReluThreshold {
  uint32_t threshold, sign;  // of two channels, bits

  template <class T>
  __device__ __forceinline__ uint32_t passes(uint32_t x) const {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    uint32_t const signed_x = x ^ sign;
    return __hgtu2_mask(reinterpret_cast<Pair const&>(signed_x),
                        reinterpret_cast<Pair const&>(threshold));
  }
};

// Of two channels, each as relu_threshold() gives it.
__device__ __forceinline__ ReluThreshold of_pair(uint32_t low, uint32_t high) {
  return {__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632)};
}

// Of one channel: threshold in the low half, sign in the high one.
template <class T>
__device__ inline uint32_t relu_threshold(Affine const& map) {
  constexpr uint32_t kInfinity = std::is_same_v<T, __half> ? 0x7c00 : 0x7f80, kNaN = 0x7fff;
  constexpr int kLeast = 0x7fff - int(kInfinity), kMost = 0x8000 + int(kInfinity);
  uint32_t const sign = map.gain < 0.f ? 0x8000 : 0;
  // Bits to numbers in the order of values, and back.
  auto const bits_of = [](int number) {
    return uint32_t(number & 0x8000 ? number ^ 0x8000 : ~number & 0xffff);
  };
  auto const passes = [&](int number) {
    return !(map(unpack<T>(bits_of(number) ^ sign, false)) <= 0.f);
  };
  // From where x is about the root, in growing steps to both sides of it.
  float const root = map.mean - map.shift / map.gain;
  uint32_t const near = (pack<T>(root, 0.f) & 0xffff) ^ sign;
  int low = int(near & 0x8000 ? ~near & 0xffff : near ^ 0x8000);
  low = min(max(low, kLeast), kMost);
  int high = low + 1;
  for (int step = 1; low >= kLeast && passes(low); step *= 4) high = low, low -= step;
  for (int step = 1; high <= kMost && !passes(high); step *= 4) low = high, high += step;
  low = max(low, kLeast - 1), high = min(high, kMost + 1);
  while (high - low > 1) {
    int const middle = (low + high) / 2;
    if (passes(middle)) {
      high = middle;
    } else {
      low = middle;
    }
  }
  return (low < kLeast ? kNaN : bits_of(low)) | sign << 16;
}

}  // namespace cutlass_bn::batch_norm
