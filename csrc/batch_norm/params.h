// What the batch-norm kernels take. Values of one channel are called its rows, as in common/finalize.h.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/channel_vector.h"
#include "common/dtype.h"

namespace cutlass_bn::batch_norm {

// A dense activation seen as [outer, channels, inner]. NCHW: outer = N, inner = H * W. channels_last, and [N, C]: outer = N * H * W,
// inner = 1. Each channel has outer * inner rows, counted in that order.
struct ChannelView {
  int64_t outer = 0;
  int64_t channels = 0;
  int64_t inner = 1;
  int64_t outer_stride = 0;  // elements; channels * inner where nothing is padded
};

struct StatsParams {
  void const* x = nullptr;  // as `view` says
  DType dtype = DType::kFloat32;
  ChannelView view;
  int64_t rows_per_tile = 0;   // of choose_rows_per_tile
  float2* partials = nullptr;  // [ceil(outer * inner / rows_per_tile), channels]: (mean, M2) of each tile's rows
};

struct ColumnMomentsParams {
  void const* x = nullptr;  // [rows, channels]
  DType dtype = DType::kFloat32;
  int64_t rows = 0;
  int64_t channels = 0;
  int64_t row_stride = 0;      // elements
  int64_t rows_per_tile = 0;   // 1 to 2^24; choose_rows_per_tile(rows, channels, dtype) is a good one
  float2* partials = nullptr;  // [ceil(rows / rows_per_tile), channels]: (mean, M2) of each tile's rows
};

struct TransformParams {
  void const* x = nullptr;  // as `view` says
  void* y = nullptr;        // the same layout and dtype
  DType dtype = DType::kFloat32;
  ChannelView view;
  float const* stats = nullptr;             // [3, channels] of common/finalize.h; null: the running statistics are used
  ChannelVector running_mean, running_var;  // [channels]; only where stats is null
  float eps = 1e-5f;                        // goes with running_var
  ChannelVector weight, bias;               // [channels]; absent: 1, 0
};

}  // namespace cutlass_bn::batch_norm
