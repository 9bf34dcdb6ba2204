// BatchNorm of a batch in one kernel.
#include "batch_norm/after.cuh"
#include "batch_norm/kernels.h"
#include "batch_norm/on_chip/kernel.cuh"
#include "batch_norm/tile_moments.cuh"
#include "common/affine.cuh"
#include "common/finalize.cuh"

namespace cutlass_bn::batch_norm {
namespace {

template <class T, class Act>
struct ForwardPass {
  static constexpr int V = kVectorWidth<T>, kTensors = 1;
  static constexpr bool kReadsBeside = false, kWritesBack = false;
  using Centre = float;
  using Values = Packet<T, V>[1][kLaneVectors];
  using Sums = TileMoments;
  using Map = Affine;

  // Of deviations from `shift`, the same in all lanes.
  struct Running {
    float shift, sum, square;
  };
  struct Inputs {
    FinalizeInputs finalize;
    float gamma, beta;
  };

  Act act;
  T const* x;
  T* y;
  ChannelVector gamma, beta;
  FinalizeParams finalize;

  __device__ __forceinline__ T const* source(int) const { return x; }
  __device__ __forceinline__ T* target() const { return y; }
  __device__ __forceinline__ float centre(int) const { return 0.f; }

  __device__ __forceinline__ Inputs inputs(int channel, bool stores) const {
    return {stores ? load_inputs(finalize, channel) : FinalizeInputs{}, gamma.load_or(channel, 1.f),
            beta.load_or(channel, 0.f)};
  }

  // The mean of the first vectors, as many as make a power of two: exact where all are equal.
  __device__ __forceinline__ Running start(float, Values const& values, int vectors) const {
    constexpr unsigned kAll = 0xffffffffu;
    float mean = tree_sum<V>([&](int i) { return values[0][0][i] * (1.f / V); });
    if (vectors < 32) return {__shfl_sync(kAll, mean, 0), 0.f, 0.f};
    for (int lanes = 16; lanes > 0; lanes /= 2)
      mean = 0.5f * mean + 0.5f * __shfl_xor_sync(kAll, mean, lanes);
    return {mean, 0.f, 0.f};
  }

  __device__ __forceinline__ void add(Running& r, Values const& values, int u,
                                      Packet<T, V> const&) const {
    float sum = 0.f, square = 0.f;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      float const deviation = values[0][u][i] - r.shift;
      sum += deviation;
      square = fmaf(deviation, deviation, square);
    }
    r.sum += sum;
    r.square += square;
  }

  __device__ __forceinline__ void add_up(Running& r) const {
    constexpr unsigned kAll = 0xffffffffu;
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      r.sum += __shfl_xor_sync(kAll, r.sum, lanes);
      r.square += __shfl_xor_sync(kAll, r.square, lanes);
    }
  }

  __device__ __forceinline__ Sums sums(Running const& r, int count) const {
    if (count == 0) return {};
    float const remainder = r.sum / float(count), m2 = fmaf(-r.sum, remainder, r.square);
    return {float(count), r.shift, remainder, m2 < 0.f ? 0.f : m2};  // this form of the clamp keeps
                                                                     // NaN
  }

  // Half of the squares are due to the distance of shift and mean: M2 has lost a bit.
  __device__ __forceinline__ bool cancels(Running const& r, Sums const& s) const {
    return s.m2 < 0.5f * r.square;
  }
  __device__ __forceinline__ Running again(Sums const& s) const {
    return {s.mean + s.remainder, 0.f, 0.f};
  }

  __device__ __forceinline__ Sums merge(Sums const& s) const { return merge_warp(s, kOnChipWarps); }
  __device__ __forceinline__ float4 partial(Sums const& s) const {
    return {s.mean, s.remainder, s.m2, s.count};
  }

  __device__ __forceinline__ Map finish(int channel, bool stores, Published const& published,
                                        Inputs const& in) const {
    double const shift = double(__shfl_sync(0xffffffffu, published.partial[0].x, 0));
    TileSums sums;
#pragma unroll
    for (float4 const& p : published.partial) {
      if (p.w != 0.f)
        cutlass_bn::add(sums, tile_sums(p.w, (double(p.x) - shift) + double(p.y), p.z));
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) cutlass_bn::add(sums, shuffle_xor(sums, lanes));
    ChannelStats const stats = channel_stats(finalize, shift, sums, 1.f);
    if (stores) store_stats(finalize, channel, stats, in.finalize);
    return affine(stats.mean, stats.remainder, in.gamma * stats.invstd, in.beta);
  }

  __device__ __forceinline__ void apply(Map const& map, Values& values, int u) const {
    values[0][u].transform([&](int, float v) { return act(map(v)); });
  }
};

}  // namespace

bool on_chip::launch_forward(OnChipForwardParams const& p, OnChipPlan const& plan,
                             cudaStream_t stream) {
  bool launched = false;
  dispatch_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_activated<kVectorWidth<T>>(p.activation, [&](auto act) {
      ForwardPass<T, decltype(act)> const pass{
          act, static_cast<T const*>(p.x), static_cast<T*>(p.y), p.gamma, p.beta, p.finalize};
      launched = launch<T>(pass, plan, p.exchange, stream);
    });
  });
  if (launched) launch_count_after(p.finalize, stream);
  return launched;
}

}  // namespace cutlass_bn::batch_norm
