// V elements of T that travel as one access, kept packed in registers until each is used: unpacked,
// eight accesses in flight would not fit.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace cutlass_bn {

__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t evict_normal_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

template <class T>
__device__ __forceinline__ float unpack(uint32_t word, bool high) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(high ? word >> 16 : word)));
  } else {
    return __uint_as_float(high ? word & 0xffff0000u : word << 16);  // one instruction either way
  }
}

template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    __half2 const pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<uint32_t const*>(&pair);
  } else {
    __nv_bfloat162 const pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t const*>(&pair);
  }
}

// Elements of 16 bytes.
template <class T>
inline constexpr int kVectorWidth = 16 / static_cast<int>(sizeof(T));

template <class T, int V>
struct Packet {
  static constexpr int kBytes = static_cast<int>(sizeof(T)) * V;
  static_assert(kBytes == 16 || V == 1);
  uint32_t word[kBytes == 16 ? 4 : 1];

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(word[i]);
    } else {
      return unpack<T>(word[i / 2], i % 2);
    }
  }

  // map(i, value) replaces value i.
  template <class Map>
  __device__ __forceinline__ void transform(Map const& map) {
    Packet const& self = *this;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < V; ++i) word[i] = __float_as_uint(map(i, self[i]));
    } else {
#pragma unroll
      for (int i = 0; i < V; i += 2)
        word[i / 2] = pack<T>(map(i, self[i]), V == 1 ? 0.f : map(i + 1, self[i + 1]));
    }
  }

  // Volatile, here and below, so that loads stay behind wait_for_previous_kernel() and together.
  __device__ __forceinline__ void load(T const* p) {
    if constexpr (kBytes == 16) {
      asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                   : "l"(p));
    } else if constexpr (kBytes == 4) {
      asm volatile("ld.global.u32 %0, [%1];" : "=r"(word[0]) : "l"(p));
    } else {
      asm volatile("ld.global.u16 %0, [%1];" : "=r"(word[0]) : "l"(p));
    }
  }

  // With the given L2 policy.
  __device__ __forceinline__ void load(T const* p, uint64_t policy) {
    if constexpr (kBytes == 16) {
      asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                   : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                   : "l"(p), "l"(policy));
    } else if constexpr (kBytes == 4) {
      asm volatile("ld.global.L2::cache_hint.u32 %0, [%1], %2;"
                   : "=r"(word[0])
                   : "l"(p), "l"(policy));
    } else {
      asm volatile("ld.global.L2::cache_hint.u16 %0, [%1], %2;"
                   : "=r"(word[0])
                   : "l"(p), "l"(policy));
    }
  }

  // By hand as well: the compiler makes four accesses of a 16-byte store in some kernels.
  __device__ __forceinline__ void store(T* p) const {
    if constexpr (kBytes == 16) {
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(word[0]), "r"(word[1]),
                   "r"(word[2]), "r"(word[3])
                   : "memory");
    } else if constexpr (kBytes == 4) {
      *reinterpret_cast<uint32_t*>(p) = word[0];
    } else {
      *reinterpret_cast<uint16_t*>(p) = static_cast<uint16_t>(word[0]);
    }
  }
};

// V elements of T in as many accesses of 16 bytes as that takes: beside a narrower tensor of which
// V elements are one.
template <class T, int V>
struct Packets {
  static constexpr int kEach = V < kVectorWidth<T> ? V : kVectorWidth<T>;
  Packet<T, kEach> part[V / kEach];

  __device__ __forceinline__ float operator[](int i) const { return part[i / kEach][i % kEach]; }

  // args: nothing, or an L2 policy.
  template <class... Args>
  __device__ __forceinline__ void load(T const* p, Args... args) {
#pragma unroll
    for (int i = 0; i < V / kEach; ++i) part[i].load(p + i * kEach, args...);
  }
};

}  // namespace cutlass_bn
