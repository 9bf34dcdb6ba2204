// What follows the normalisation: y = activation(v), v = BatchNorm(x) or BatchNorm(x) + residual,
// and dv = dy * activation'(v). An activation is a type, so that no kernel branches on it in its
// loop (docs/notes/2026-11-29-memory-bound-kernels.md).
#pragma once

#include <type_traits>

#include "batch_norm/params.h"
#include "batch_norm/tiling.h"
#include "common/activation_gradient.cuh"

namespace cutlass_bn::batch_norm {

struct Identity {
  static constexpr bool kIdentity = true;
  __device__ __forceinline__ float operator()(float v) const { return v; }
  __device__ __forceinline__ float gradient(float dy, float) const { return dy; }
};

template <Activation kOf>
struct Activated {
  static constexpr bool kIdentity = false;
  __device__ __forceinline__ float operator()(float v) const { return activate(v, kOf); }
  __device__ __forceinline__ float gradient(float dy, float v) const {
    return activation_gradient<kOf>(dy, v);
  }
};

template <class Act>
inline constexpr bool is_relu = std::is_same_v<Act, Activated<Activation::kRelu>>;
template <class Act>
inline constexpr bool is_rectifier = is_relu<Act> ||
                                     std::is_same_v<Act, Activated<Activation::kLeakyRelu>>;

// Any of them: for kernels that take an element at a time, which are slow anyhow.
struct AnyActivation {
  static constexpr bool kIdentity = false;
  Activation activation;

  __device__ __forceinline__ float operator()(float v) const { return activate(v, activation); }
  __device__ __forceinline__ float gradient(float dy, float v) const {
    switch (activation) {
      case Activation::kRelu: return activation_gradient<Activation::kRelu>(dy, v);
      case Activation::kGelu: return activation_gradient<Activation::kGelu>(dy, v);
      case Activation::kSilu: return activation_gradient<Activation::kSilu>(dy, v);
      case Activation::kLeakyRelu: return activation_gradient<Activation::kLeakyRelu>(dy, v);
      default: return dy;
    }
  }
};

// Calls body(act) for vectors of V elements.
template <int V, class Body>
void dispatch_activated(Activation activation, Body&& body) {
  if (activation == Activation::kNone) return body(Identity{});
  if constexpr (V == 1) {
    return body(AnyActivation{activation});
  } else {
    switch (activation) {
      case Activation::kRelu: return body(Activated<Activation::kRelu>{});
      case Activation::kGelu: return body(Activated<Activation::kGelu>{});
      case Activation::kSilu: return body(Activated<Activation::kSilu>{});
      default: return body(Activated<Activation::kLeakyRelu>{});
    }
  }
}

// dv, as a backward finds it. kSaved: from what, beside dy and x; kWithX: sums are taken of dv * (x
// - mean) too.
template <class Act, Saved kSavedOf, bool kWithXOf>
struct Derivative {
  using Activation = Act;
  static constexpr bool kIdentity = Act::kIdentity, kWithX = kWithXOf;
  static constexpr Saved kSaved = kSavedOf;
  static constexpr bool kReadsSaved = kSaved != Saved::kNothing;
  static constexpr bool kMakesV = !kIdentity && kSaved != Saved::kOutput;
  static_assert(!kMakesV || kWithX);
  static constexpr int kTensors = 1 + kWithX + kReadsSaved;
  // Of the column kernels, whose threads hold what V channels need.
  static constexpr int blocks_per_sm(int V) {
    return V == 4 && kTensors + kMakesV > 2 ? 2 : column_blocks_per_sm(V);
  }
  // As many vectors of each tensor in flight as registers are left for.
  static constexpr int kLoads = kMakesV && kReadsSaved ? kGradientLoads<true> / 2
                                                       : kGradientLoads<(kTensors > 1)>;

  Act act;

  // centred: x - mean. v has the bits of the forward's.
  __device__ __forceinline__ float operator()(float dy, float centred, float gain, float offset,
                                              float saved) const {
    if constexpr (kIdentity) {
      return dy;
    } else if constexpr (kSaved == Saved::kOutput) {
      return act.gradient(dy, saved);
    } else {
      float const v = fmaf(centred, gain, offset);
      return act.gradient(dy, kSaved == Saved::kResidual ? v + saved : v);
    }
  }
};

// Calls body(derivative) for vectors of V elements. kSaves: something may be saved.
template <int V, bool kSaves = true, class Body>
void dispatch_derivative(GradientSource const& source, Body&& body) {
  bool const with_x = source.x != nullptr;
  Saved const saved = source.saved_as();
  dispatch_activated<V>(source.layer.activation, [&](auto act) {
    using Act = decltype(act);
    if constexpr (Act::kIdentity) {
      return with_x ? body(Derivative<Act, Saved::kNothing, true>{act})
                    : body(Derivative<Act, Saved::kNothing, false>{act});
    } else {
      if constexpr (kSaves && (V == 1 || is_rectifier<Act>)) {
        if (saved == Saved::kOutput) {
          return with_x ? body(Derivative<Act, Saved::kOutput, true>{act})
                        : body(Derivative<Act, Saved::kOutput, false>{act});
        }
      }
      CUTLASS_BN_CHECK(with_x,
                       "x: expected a tensor, as the activation's derivative depends on it");
      if constexpr (kSaves && (V == 1 || !is_rectifier<Act>)) {
        if (saved == Saved::kResidual) return body(Derivative<Act, Saved::kResidual, true>{act});
      }
      return body(Derivative<Act, Saved::kNothing, true>{act});
    }
  });
}

}  // namespace cutlass_bn::batch_norm
