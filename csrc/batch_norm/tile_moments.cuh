// Moments inside a tile. The mean is kept in two parts, rounded and remainder: errors then are
// 2^-24 of the standard deviation instead of the mean, and the fp32 mean that a tile reports is
// correctly rounded.
#pragma once

#include "batch_norm/params.h"

namespace cutlass_bn::batch_norm {

// The mean is mean + remainder. The count is exact up to 2^24.
struct TileMoments {
  float count = 0.f;
  float mean = 0.f;
  float remainder = 0.f;
  float m2 = 0.f;
};

// Chan's merge of b into a on two-part means, but for the count: weight = b.count / (a.count +
// b.count), m2_weight = a.count * weight. Neither is empty. Two sets with the same single value
// merge without any rounding.
__device__ __forceinline__ void absorb(TileMoments& a, TileMoments const& b, float weight,
                                       float m2_weight) {
  float const delta = (b.mean - a.mean) + (b.remainder - a.remainder);
  float const step = __fmul_rn(delta, weight);
  // Knuth's two-sum: mean + error = a.mean + step exactly. The intrinsics keep the compiler from
  // contracting it.
  float const mean = __fadd_rn(a.mean, step);
  float const added = __fsub_rn(mean, a.mean);
  float const error = __fadd_rn(__fsub_rn(a.mean, __fsub_rn(mean, added)), __fsub_rn(step, added));
  a.mean = mean;
  a.remainder += error;
  a.m2 = fmaf(delta * m2_weight, delta, a.m2 + b.m2);
}

// The moments of the union of two sets (T. Chan, G. Golub, R. LeVeque, 1983, eq. 2.1). An empty
// side does not contribute, whatever its mean.
__device__ __forceinline__ TileMoments merge(TileMoments a, TileMoments const& b) {
  if (b.count == 0.f) return a;
  if (a.count == 0.f) return b;
  float const count = a.count + b.count;
  float const weight = __fdividef(b.count, count);
  absorb(a, b, weight, a.count * weight);
  a.count = count;
  return a;
}

// `near` is close to the mean of the values; the deviations from it give the rest. `value(i)` is
// called for i < N, and counts where i < count.
template <int N, bool kFull, class Value>
__device__ __forceinline__ TileMoments moments_around(float near, int count, Value const& value) {
  float sum = 0.f, square = 0.f;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float const deviation = value(i) - near;
    if (kFull || i < count) {
      sum += deviation;
      square = fmaf(deviation, deviation, square);
    }
  }
  float const n = kFull ? float(N) : float(count);
  float const remainder = kFull ? sum * (1.f / N) : sum / n;
  float const m2 = fmaf(-sum, remainder, square);
  return {n, near, remainder, m2 < 0.f ? 0.f : m2};  // this form of the clamp keeps NaN
}

// value(From) + ... + value(From + N - 1) as a balanced tree, N a power of two: exact where all are
// equal.
template <int N, int From = 0, class Value>
__device__ __forceinline__ float tree_sum(Value const& value) {
  if constexpr (N == 1) {
    return value(From);
  } else {
    return tree_sum<N / 2, From>(value) + tree_sum<N / 2, From + N / 2>(value);
  }
}

// Of N values, N a power of two. The mean of equal values is exact, as its sum is.
template <int N, class Value>
__device__ __forceinline__ TileMoments moments_of(Value const& value) {
  // Scaled before they are summed, which is as exact and can't overflow.
  return moments_around<N, true>(tree_sum<N>([&](int i) { return value(i) * (1.f / N); }), N,
                                 value);
}

// Of the first `count` of N values, count > 0. Their mean is taken around the first: exact again
// where all are equal.
template <int N, class Value>
__device__ __forceinline__ TileMoments moments_of(Value const& value, int count) {
  float const first = value(0);
  float sum = 0.f;
#pragma unroll
  for (int i = 1; i < N; ++i) {
    if (i < count) sum += value(i) - first;
  }
  return moments_around<N, false>(first + sum / float(count), count, value);
}

__device__ __forceinline__ TileMoments shuffle_down(TileMoments const& m, int lanes) {
  constexpr unsigned kAll = 0xffffffffu;
  return {__shfl_down_sync(kAll, m.count, lanes), __shfl_down_sync(kAll, m.mean, lanes),
          __shfl_down_sync(kAll, m.remainder, lanes), __shfl_down_sync(kAll, m.m2, lanes)};
}

// Over the first `width` lanes (a power of two) of a warp, all of whose lanes call it; lane 0 has
// the result.
__device__ __forceinline__ TileMoments merge_warp(TileMoments m, int width = 32) {
  for (int lanes = width / 2; lanes > 0; lanes /= 2) m = merge(m, shuffle_down(m, lanes));
  return m;
}

// Over a block of Threads; thread 0 has the result.
template <int Threads>
__device__ __forceinline__ TileMoments merge_block(TileMoments m) {
  constexpr int kWarps = Threads / 32;
  __shared__ TileMoments shared[kWarps];
  m = merge_warp(m);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = m;
  __syncthreads();
  if (threadIdx.x >= 32) return {};
  return merge_warp(threadIdx.x < kWarps ? shared[threadIdx.x] : TileMoments{}, kWarps);
}

__device__ __forceinline__ void report(TileMomentsOut const& out, int64_t index,
                                       TileMoments const& m) {
  float const mean = __fadd_rn(m.mean, m.remainder);
  out.partials[index] = {mean, m.m2};
  out.remainders[index] = __fsub_rn(m.remainder, __fsub_rn(mean, m.mean));
}

}  // namespace cutlass_bn::batch_norm
