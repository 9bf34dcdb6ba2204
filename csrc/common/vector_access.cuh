// 16-byte global memory access with cache hints.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace cutlass_bn {

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <class T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) { return v; }
template <>
__device__ __forceinline__ __half from_float<__half>(float v) { return __float2half_rn(v); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) { return __float2bfloat16_rn(v); }

// N elements that travel as one access; 16 bytes where N = kVectorWidth<T>.
template <class T, int N>
struct alignas(sizeof(T) * N) Vector {
  T value[N];
};

template <class T>
inline constexpr int kVectorWidth = 16 / static_cast<int>(sizeof(T));

namespace detail {
template <int Bytes>
struct Word;
template <> struct Word<16> { using type = uint4; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<4> { using type = unsigned int; };
template <> struct Word<2> { using type = unsigned short; };
}  // namespace detail

// A read that will come again soon: default caching.
template <int N, class T>
__device__ __forceinline__ Vector<T, N> load_vector(T const* p) {
  return *reinterpret_cast<Vector<T, N> const*>(p);
}

// Read or written once: first to leave the cache.
template <int N, class T>
__device__ __forceinline__ Vector<T, N> load_vector_streaming(T const* p) {
  using Word = typename detail::Word<sizeof(T) * N>::type;
  Word const word = __ldcs(reinterpret_cast<Word const*>(p));
  return *reinterpret_cast<Vector<T, N> const*>(&word);
}

template <int N, class T>
__device__ __forceinline__ void store_vector(T* p, Vector<T, N> const& v) {
  *reinterpret_cast<Vector<T, N>*>(p) = v;
}

template <int N, class T>
__device__ __forceinline__ void store_vector_streaming(T* p, Vector<T, N> const& v) {
  using Word = typename detail::Word<sizeof(T) * N>::type;
  __stcs(reinterpret_cast<Word*>(p), *reinterpret_cast<Word const*>(&v));
}

}  // namespace cutlass_bn
