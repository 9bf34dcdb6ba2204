// Moments of a set of values: (count, mean, M2), M2 the sum of squared deviations from the mean. Never E[x^2] - E[x]^2.
#pragma once

namespace cutlass_bn {

template <class T>
struct Moments {
  T count = 0;
  T mean = 0;
  T m2 = 0;
};

// The moments of the union of two sets. T. Chan, G. Golub, R. LeVeque, "Algorithms for computing the sample variance", 1983, eq. 2.1.
// An empty side must not contribute: its mean may be anything, even NaN.
template <class T>
__device__ __forceinline__ Moments<T> merge(Moments<T> a, Moments<T> b) {
  if (b.count == T(0)) return a;
  if (a.count == T(0)) return b;
  T const count = a.count + b.count;
  T const delta = b.mean - a.mean;
  T const weight = b.count / count;
  return {count, a.mean + delta * weight, a.m2 + b.m2 + delta * delta * (a.count * weight)};
}

}  // namespace cutlass_bn
