// What the transforms do with a vector of every tensor: an Op, which columns/map.cuh and
// planes/map.cuh take through the tensors.
//
//   kAccesses, kBlocksPerSm    of the column kernel: rows that a thread has in flight together
//   kCoefficients         floats that it needs of a channel
//   coefficients(...)     loads them
//   Packets               V elements of each tensor that it reads
//   load(...)             from `at`
//   store(...)            maps and stores them; of(v, i): coefficient i of element v
#pragma once

#include "batch_norm/after.cuh"
#include "batch_norm/channel_affines.cuh"
#include "batch_norm/gradient_map.cuh"
#include "batch_norm/relu_mask.cuh"
#include "batch_norm/transform_walk.cuh"
#include "common/packet.cuh"

namespace cutlass_bn::batch_norm {

// Of a vector, in elements.
struct Place {
  int64_t row, column;  // of a matrix
  int64_t offset;       // from the first of a tensor that lies as the view says
};

// y = activation((x - mean) * gain + shift + residual).
template <class T, int V, class Act, bool kResidual>
struct ForwardOp {
  static constexpr int kCoefficients = 3;
  static constexpr bool kMatrix = false;
  static constexpr int kAccesses = kTransformAccesses;
  static constexpr int kBlocksPerSm = V == 8 || kResidual || !Act::kIdentity ? 4 : 6;
  struct Packets {
    Packet<T, V> x, residual;
  };

  ChannelAffines maps;
  Act act;
  T const* x;
  T const* residual;
  T* y;

  __device__ __forceinline__ void coefficients(int64_t channel, float (&c)[3]) const {
    Affine const map = maps.at(channel);
    c[0] = map.mean, c[1] = map.gain, c[2] = map.shift;
  }

  __device__ __forceinline__ void load(Packets& p, Place const& at) const {
    p.x.load(x + at.offset);
    if constexpr (kResidual) p.residual.load(residual + at.offset);
  }

  template <class Of>
  __device__ __forceinline__ void store(Packets& p, Place const& at, Of const& of) const {
    p.x.transform([&](int v, float value) {
      float const normalised = Affine{of(v, 0), of(v, 1), of(v, 2)}(value);
      return act(kResidual ? normalised + p.residual[v] : normalised);
    });
    p.x.store(y + at.offset);
  }
};

// dx of training, dv = dy * act'(v) of v made of x again. kMatrixOf: dy and dx have row strides of
// their own.
template <class G, class T, int V, class Act, bool kMatrixOf>
struct GradientOp {
  static constexpr int kCoefficients = Act::kIdentity ? 5 : 6;
  static constexpr bool kMatrix = kMatrixOf, kMasks = is_relu<Act> && sizeof(G) == 2 && V > 1;
  static constexpr int kAccesses = kMatrix || !Act::kIdentity ? 2 * kTransformAccesses
                                                              : kTransformAccesses;
  static constexpr int kBlocksPerSm = kAccesses > kTransformAccesses ? 2 : V == 8 ? 3 : 4;
  struct Packets {
    cutlass_bn::Packets<G, V> dy;
    Packet<T, V> x;
  };

  GradientMaps maps;
  Act act;
  G const* dy;
  T const* x;
  T* dx;
  int64_t dy_row_stride, dx_row_stride;  // of a matrix

  __device__ __forceinline__ void coefficients(int64_t channel, float (&c)[kCoefficients]) const {
    GradientMap const map = load_map(maps, channel);
    c[0] = map.mean, c[1] = map.mean_dy, c[2] = map.slope, c[3] = map.gain, c[4] = map.shift;
    if constexpr (kMasks) {
      c[5] = __uint_as_float(load_threshold(maps, channel));
    } else if constexpr (!Act::kIdentity) {
      c[5] = load_offset(maps, channel);
    }
  }

  __device__ __forceinline__ void load(Packets& p, Place const& at) const {
    p.dy.load(dy + (kMatrix ? at.row * dy_row_stride + at.column : at.offset));
    p.x.load(x + at.offset);
  }

  template <class Of>
  __device__ __forceinline__ void store(Packets& p, Place const& at, Of const& of) const {
    if constexpr (kMasks) {
#pragma unroll
      for (int v = 0; v < V; v += 2) {
        ReluThreshold const threshold = of_pair(__float_as_uint(of(v, 5)),
                                                __float_as_uint(of(v + 1, 5)));
        p.dy.part[0].word[v / 2] &= threshold.template passes<T>(p.x.word[v / 2]);
      }
    }
    p.x.transform([&](int v, float value) {
      GradientMap const map{of(v, 0), of(v, 1), of(v, 2), of(v, 3), of(v, 4)};
      float dv = p.dy[v];
      if constexpr (!Act::kIdentity && !kMasks)
        dv = act.gradient(dv, fmaf(value - map.mean, map.gain, of(v, 5)));
      return map(dv, value);
    });
    p.x.store(dx + (kMatrix ? at.row * dx_row_stride + at.column : at.offset));
  }
};

// dv, and dx = dv * gain: no sums are needed. What is absent is null, and the activation any: a
// kernel that is rarely needed.
template <class T, int V>
struct ScaleOp {
  static constexpr int kCoefficients = 3;
  static constexpr bool kMatrix = false;
  static constexpr int kAccesses = kTransformAccesses;
  static constexpr int kBlocksPerSm = 3;
  struct Packets {
    Packet<T, V> dy, x, saved;
  };

  ChannelAffines maps;
  AnyActivation act;
  Saved saved_as;
  T const* dy;
  T const* x;
  T const* saved;
  T* dv;
  T* dx;

  __device__ __forceinline__ void coefficients(int64_t channel, float (&c)[3]) const {
    c[0] = c[1] = c[2] = 0.f;
    if (dx == nullptr && saved_as == Saved::kOutput) return;  // statistics may be absent
    Affine const map = maps.at(channel);
    c[0] = map.mean, c[1] = map.gain, c[2] = map.shift;
  }

  __device__ __forceinline__ void load(Packets& p, Place const& at) const {
    p.x = {}, p.saved = {};
    p.dy.load(dy + at.offset);
    if (x != nullptr) p.x.load(x + at.offset);
    if (saved != nullptr) p.saved.load(saved + at.offset);
  }

  template <class Of>
  __device__ __forceinline__ void store(Packets& p, Place const& at, Of const& of) const {
    p.dy.transform([&](int v, float value) {
      float made = p.saved[v];
      if (saved_as != Saved::kOutput) {
        made = Affine{of(v, 0), of(v, 1), of(v, 2)}(p.x[v]);
        if (saved_as == Saved::kResidual) made += p.saved[v];
      }
      return act.gradient(value, made);
    });
    if (dv != nullptr) p.dy.store(dv + at.offset);
    if (dx == nullptr) return;
    p.dy.transform([&](int v, float value) { return value * of(v, 1); });
    p.dy.store(dx + at.offset);
  }
};

}  // namespace cutlass_bn::batch_norm
