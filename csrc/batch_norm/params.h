// What the batch-norm kernels take. Values of one channel are called its rows, as in
// common/finalize.h.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/channel_vector.h"
#include "common/dtype.h"
#include "common/finalize.h"
#include "common/layer.h"

namespace cutlass_bn::batch_norm {

// A dense activation seen as [outer, channels, inner]. NCHW: outer = N, inner = H * W.
// channels_last, and [N, C]: outer = N * H * W, inner = 1. Each channel has outer * inner rows,
// counted in that order.
struct ChannelView {
  int64_t outer = 0;
  int64_t channels = 0;
  int64_t inner = 1;
  int64_t outer_stride = 0;  // elements; channels * inner where nothing is padded

  int64_t rows() const { return outer * inner; }
};

// Moments of each tile's rows of each channel, as FinalizeParams takes them.
struct TileMomentsOut {
  float2* partials = nullptr;   // (mean, M2)
  float* remainders = nullptr;  // what rounding left over of the mean: the variance between tiles
                                // depends on it at |mean| >> std
};

struct StatsParams {
  void const* x = nullptr;  // as `view` says
  DType dtype = DType::kFloat32;
  ChannelView view;
  int64_t rows_per_tile = 0;  // of choose_rows_per_tile
  TileMomentsOut out;         // [ceil(rows / rows_per_tile), channels]
};

struct TransformParams {
  void const* x = nullptr;         // as `view` says
  void const* residual = nullptr;  // the same layout and dtype, as is y; null: none
  void* y = nullptr;
  DType dtype = DType::kFloat32;
  ChannelView view;
  float const* stats = nullptr;  // [3, channels] of common/finalize.h; null: the layer's running
                                 // statistics are used
  Layer layer;                   // without bias and scale; running_mean absent: 0
};

// What a backward has beside dy and x to find dv = dy * activation'(v), v = BatchNorm(x) or
// BatchNorm(x) + residual: nothing without an activation or a residual; y, of whose sign the
// derivatives of relu and leaky_relu are functions; or the residual, from which and x v is made
// again.
enum class Saved { kNothing, kOutput, kResidual };

inline Saved saved_for(Activation activation, bool with_residual) {
  if (activation == Activation::kNone || !with_residual) return Saved::kNothing;
  bool const rectifies = activation == Activation::kRelu || activation == Activation::kLeakyRelu;
  return rectifies ? Saved::kOutput : Saved::kResidual;
}

// dy, x and what the forward did.
struct GradientSource {
  void const* dy = nullptr;     // as `view` says, but for its dtype and row stride
  void const* x = nullptr;      // as `view` says; null: not needed
  void const* saved = nullptr;  // the same layout and dtype as x's; null: nothing
  DType dtype = DType::kFloat32;
  DType dy_dtype = DType::kFloat32;  // dtype; or float32, of matrices with nothing saved
  ChannelView view;
  int64_t dy_row_stride = 0;     // elements; the view's outer_stride but for matrices, 0 for the
                                 // rows of an expanded dy
  float const* stats = nullptr;  // [3, channels] of common/finalize.h; null: eval
  Layer layer;                   // without bias

  Saved saved_as() const { return saved_for(layer.activation, saved != nullptr); }
};

struct GradientSumsParams {
  GradientSource source;
  void* dv = nullptr;          // where dv is stored, as source.saved lies; null: nowhere
  int64_t rows_per_tile = 0;   // of choose_gradient_rows_per_tile
  float2* partials = nullptr;  // [ceil(rows / rows_per_tile), channels]: sums of dv, and with x of
                               // dv * (x - mean), over a tile's rows; of dv as it is stored where
                               // something is saved
};

// dx = (dy - mean_dy - (x - mean) * slope) * gain + shift of one channel; shift is what rounding
// left of both means.
struct GradientMaps {
  float4* main = nullptr;   // [channels]: mean, mean_dy, slope, gain
  float* shift = nullptr;   // [channels]
  float* offset = nullptr;  // [channels]: v = (x - mean) * gain + offset; null where no activation
                            // follows
  uint32_t* threshold = nullptr;  // [channels]: of relu_mask.cuh; null but for relu where x and dy
                                  // are of half precision
};

struct GradientFinalizeParams {
  float2 const* partials = nullptr;  // of GradientSumsParams
  int64_t tiles = 0;
  int64_t channels = 0;
  int64_t rows = 0;              // values per channel
  float const* stats = nullptr;  // [3, channels] of common/finalize.h; null: eval, with the running
                                 // variance
  ChannelVector running_var;     // [channels]; only where stats is null, and for dgamma
  double eps = 1e-5;             // goes with running_var, and with dscale
  ChannelVector scale;  // [channels], of x before the normalisation, as in common/finalize.h;
                        // absent: 1
  ChannelVector gamma;  // [channels], for maps and dscale; absent: 1
  ChannelVector beta;   // [channels], for maps.offset; absent: 0
  MutableChannelVector dscale;      // [channels]; absent: not asked for; only with stats
  MutableChannelVector dgamma;      // [channels]; absent: not asked for
  MutableChannelVector dbeta;       // [channels]; absent: not asked for
  MutableChannelVector dshift;      // [channels]: zeros, the gradient of what the mean takes away
                                    // again; absent: not asked for
  GradientMaps maps;                // absent: not asked for; only with stats
  DType x_dtype = DType::kFloat32;  // for maps.threshold
};

// dx of training. Of what is saved nothing is read: dv is, in place of dy and without an
// activation.
struct GradientTransformParams {
  GradientSource source;
  void* dx = nullptr;         // as source.x lies, or as dy does
  int64_t dx_row_stride = 0;  // elements; the view's outer_stride but for matrices
  GradientMaps maps;          // of GradientFinalizeParams
};

// dv and dx = dv * gamma * invstd where no sums are needed: eval, or dv alone.
struct GradientScaleParams {
  GradientSource source;
  void* dv = nullptr;  // as source.x lies; null: not asked for
  void* dx = nullptr;  // the same; only without stats
};

// The whole of a training forward and backward, for channels that are kept on chip
// (on_chip/plan.h).
struct OnChipForwardParams {
  void const* x = nullptr;  // as the plan's view says; a multiple of 16 bytes
  void* y = nullptr;        // the same
  DType dtype = DType::kFloat32;
  ChannelVector gamma, beta;  // [channels]; absent: 1, 0
  Activation activation = Activation::kNone;
  FinalizeParams finalize;     // without partials, tiles, scale and bias
  float4* exchange = nullptr;  // exchange_values() of the plan
};

struct OnChipBackwardParams {
  GradientSource source;  // multiples of 16 bytes, as are dv and dx
  void* dv = nullptr;     // null: not asked for
  void* dx = nullptr;
  GradientFinalizeParams finalize;  // without partials, tiles and maps; with stats
  float4* exchange = nullptr;       // exchange_values() of the plan
};

}  // namespace cutlass_bn::batch_norm
