// The gradients of BatchNorm of a batch, dx among them, in one kernel.
#include "batch_norm/after.cuh"
#include "batch_norm/channel_affines.cuh"
#include "batch_norm/gradient_finalize.cuh"
#include "batch_norm/gradient_sums.cuh"
#include "batch_norm/kernels.h"
#include "batch_norm/on_chip/kernel.cuh"

namespace cutlass_bn::batch_norm {
namespace {

// dv takes dy's place on chip when it is summed, as it is stored.
template <class T, class Of>
struct GradientPass {
  static constexpr int V = kVectorWidth<T>, kTensors = 2;
  static constexpr bool kReadsBeside = Of::kReadsSaved, kWritesBack = !Of::kIdentity;
  using Centre = Affine;
  using Values = Packet<T, V>[2][kLaneVectors];  // dy, x
  using Sums = GradientSums;
  using Map = GradientMap;
  using Inputs = GradientInputs;

  struct Running {
    Affine map;
    GradientSums sums;
  };

  Of derivative;
  ChannelAffines maps;
  T const* dy;
  T const* x;
  T const* saved;
  T* dv;
  T* dx;
  GradientFinalizeParams finalize;

  __device__ __forceinline__ T const* source(int tensor) const { return tensor == 0 ? dy : x; }
  __device__ __forceinline__ T const* beside() const { return saved; }
  __device__ __forceinline__ T* target() const { return dx; }
  __device__ __forceinline__ Centre centre(int channel) const {
    if constexpr (Of::kMakesV) return maps.at(channel);
    return {finalize.stats[channel], 0.f, 0.f};
  }
  __device__ __forceinline__ Inputs inputs(int channel, bool) const {
    return load_inputs(finalize, channel);
  }
  __device__ __forceinline__ Running start(Centre const& centre, Values const&, int) const {
    return {centre, {}};
  }

  __device__ __forceinline__ void add(Running& r, Values& values, int u,
                                      Packet<T, V> const& beside) const {
    Packet<T, V> const& x = values[1][u];
    if constexpr (kWritesBack) {
      values[0][u].transform([&](int i, float dy) {
        return derivative(dy, x[i] - r.map.mean, r.map.gain, r.map.shift,
                          Of::kReadsSaved ? beside[i] : 0.f);
      });
    }
    GradientSums vector;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      float const dv = values[0][u][i];
      vector.dy += dv;
      vector.product = fmaf(dv, x[i] - r.map.mean, vector.product);
    }
    batch_norm::add(r.sums, vector);
  }
  __device__ __forceinline__ void added(Packet<T, V> const& value, int64_t offset) const {
    if (Of::kReadsSaved && dv != nullptr) value.store(dv + offset);
  }

  __device__ __forceinline__ void add_up(Running& r) const { r.sums = add_warp(r.sums); }
  __device__ __forceinline__ Sums sums(Running const& r, int) const { return r.sums; }
  __device__ __forceinline__ bool cancels(Running const&, Sums const&) const { return false; }
  __device__ __forceinline__ Running again(Sums const&) const { return {}; }
  __device__ __forceinline__ Sums merge(Sums const& s) const { return add_warp(s, kOnChipWarps); }
  __device__ __forceinline__ float4 partial(Sums const& s) const {
    return {s.dy, s.product, 0.f, 1.f};
  }

  __device__ __forceinline__ Map finish(int channel, bool stores, Published const& published,
                                        Inputs const& in) const {
    WideSums sums;
#pragma unroll
    for (float4 const& p : published.partial) batch_norm::add(sums, {double(p.x), double(p.y)});
    for (int lanes = 16; lanes > 0; lanes /= 2) batch_norm::add(sums, shuffle_xor(sums, lanes));
    ChannelGradients const gradients = channel_gradients(finalize, sums, in);
    if (stores) store_gradients(finalize, channel, gradients);
    return gradients.map;
  }

  __device__ __forceinline__ void apply(Map const& map, Values& values, int u) const {
    Packet<T, V> const& x = values[1][u];
    values[0][u].transform([&](int i, float dv) { return map(dv, x[i]); });
  }
};

}  // namespace

bool on_chip::launch_backward(OnChipBackwardParams const& p, OnChipPlan const& plan,
                              cudaStream_t stream) {
  CUTLASS_BN_CHECK(p.finalize.stats != nullptr, "stats: expected those of a batch, got none");
  GradientSource const& source = p.source;
  bool launched = false;
  dispatch_dtype(source.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_derivative<kVectorWidth<T>>(source, [&](auto derivative) {
      using Of = decltype(derivative);
      if constexpr (Of::kWithX) {
        GradientPass<T, Of> const pass{derivative,
                                       ChannelAffines(source.stats, plan.channels, source.layer),
                                       static_cast<T const*>(source.dy),
                                       static_cast<T const*>(source.x),
                                       static_cast<T const*>(source.saved),
                                       static_cast<T*>(p.dv),
                                       static_cast<T*>(p.dx),
                                       p.finalize};
        launched = launch<T>(pass, plan, p.exchange, stream);
      }
    });
  });
  return launched;
}

}  // namespace cutlass_bn::batch_norm
