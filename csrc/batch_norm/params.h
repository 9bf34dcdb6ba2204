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
  void const* x = nullptr;  // as `view` says
  void* y = nullptr;        // the same layout and dtype
  DType dtype = DType::kFloat32;
  ChannelView view;
  float const* stats = nullptr;  // [3, channels] of common/finalize.h; null: the layer's running
                                 // statistics are used
  Layer layer;                   // without bias, scale and activation; running_mean absent: 0
};

struct GradientSumsParams {
  void const* dy = nullptr;  // as `view` says
  void const* x = nullptr;   // the same layout and dtype; null: only dy is summed
  DType dtype = DType::kFloat32;
  ChannelView view;
  ChannelVector mean;          // [channels], what x is centred on; only with x
  int64_t rows_per_tile = 0;   // of choose_gradient_rows_per_tile
  float2* partials = nullptr;  // [ceil(rows / rows_per_tile), channels]: sums of dy and dy * (x -
                               // mean) over a tile's rows
};

// dx = (dy - mean_dy - (x - mean) * slope) * gain + shift of one channel; shift is what rounding
// left of both means.
struct GradientMaps {
  float4* main = nullptr;   // [channels]: mean, mean_dy, slope, gain
  float* shift = nullptr;   // [channels]
  float* offset = nullptr;  // [channels]: v = (x - mean) * gain + offset; null where no activation
                            // follows
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
  MutableChannelVector dscale;  // [channels]; absent: not asked for; only with stats
  MutableChannelVector dgamma;  // [channels]; absent: not asked for
  MutableChannelVector dbeta;   // [channels]; absent: not asked for
  GradientMaps maps;            // absent: not asked for; only with stats
};

struct GradientTransformParams {
  void const* dy = nullptr;  // as `view` says
  void const* x = nullptr;   // the same layout and dtype, as is dx
  void* dx = nullptr;
  DType dtype = DType::kFloat32;
  ChannelView view;
  GradientMaps maps;  // of GradientFinalizeParams
};

// The whole of a training forward and backward, for channels that are kept on chip
// (on_chip/plan.h).
struct OnChipForwardParams {
  void const* x = nullptr;  // as the plan's view says; a multiple of 16 bytes
  void* y = nullptr;        // the same
  DType dtype = DType::kFloat32;
  ChannelVector gamma, beta;   // [channels]; absent: 1, 0
  FinalizeParams finalize;     // without partials, tiles, scale and bias
  float4* exchange = nullptr;  // exchange_values() of the plan
};

struct OnChipBackwardParams {
  void const* dy = nullptr;  // as the plan's view says; a multiple of 16 bytes
  void const* x = nullptr;   // the same, as is dx
  void* dx = nullptr;
  DType dtype = DType::kFloat32;
  GradientFinalizeParams finalize;  // without partials, tiles and maps; with stats
  float4* exchange = nullptr;       // exchange_values() of the plan
};

// A matrix x whose columns are the channels, and the gradient of y = activation(v), v = (x - mean)
// * (gamma * scale * invstd) + beta.
struct ActivatedMatrix {
  void const* dy = nullptr;  // [rows, channels], float32 or of x's dtype
  void const* x = nullptr;   // [rows, channels]
  DType dy_dtype = DType::kFloat32, x_dtype = DType::kFloat32;
  int64_t rows = 0, channels = 0;
  int64_t dy_row_stride = 0, x_row_stride = 0;  // elements; 0 for the rows of an expanded dy
  Activation activation = Activation::kNone;
};

struct ActivatedSumsParams {
  ActivatedMatrix matrix;
  float const* stats = nullptr;      // [3, channels] of common/finalize.h
  ChannelVector scale, gamma, beta;  // [channels]; absent: 1, 1, 0
  int64_t rows_per_tile = 0;         // of choose_gradient_rows_per_tile
  float2* partials = nullptr;  // [ceil(rows / rows_per_tile), channels]: sums of dv and dv * (x -
                               // mean) over a tile's rows
};

struct ActivatedTransformParams {
  ActivatedMatrix matrix;
  void* dx = nullptr;         // [rows, channels], of x's dtype
  int64_t dx_row_stride = 0;  // elements
  GradientMaps maps;          // of GradientFinalizeParams, with offset
};

}  // namespace cutlass_bn::batch_norm
