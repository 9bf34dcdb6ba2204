// From the moments of tiles to what the normalise kernels and the running buffers need. Shared by
// every training forward.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/channel_vector.h"

namespace cutlass_bn {

// With u the values that the moments were taken of, the layer normalises z = scale * (u + bias):
//   mean_u, var_u    merged over the tiles in fp64 (Chan et al., biased variance)
//   invstd         = 1 / sqrt(scale^2 * var_u + eps)
//   running_mean  <- (1 - f) * running_mean + f * scale * (mean_u + bias)
//   running_var   <- (1 - f) * running_var  + f * scale^2 * var_u * n / (n - 1)
// f is `momentum`, or 1 / num_batches_tracked (after its increment) where `cumulative`.
struct FinalizeParams {
  float2 const* partials = nullptr;   // [tiles, channels]: (mean, M2) of each tile's rows
  float const* remainders = nullptr;  // [tiles, channels]: what rounding left over of each mean;
                                      // null: nothing
  int64_t tiles = 0;
  int64_t channels = 0;
  int64_t rows = 0;                        // values per channel, n
  int64_t rows_per_tile = 0;               // of every tile but the last, which has what is left
  ChannelVector scale;                     // [channels]; absent: 1
  ChannelVector bias;                      // [channels]; absent: 0
  MutableChannelVector running_mean;       // [channels]; absent: not tracked
  MutableChannelVector running_var;        // [channels]
  int64_t* num_batches_tracked = nullptr;  // [1]; null: not counted
  double momentum = 0.1;
  bool cumulative = false;
  double eps = 1e-5;
  float* stats = nullptr;  // [3, channels]: mean_u rounded to fp32, what that rounding left over,
                           // invstd
};

// One or (cumulative) two kernels. rows must be positive; an empty batch goes to
// launch_count_batch.
void launch_finalize(FinalizeParams const& params, cudaStream_t stream);

// num_batches_tracked += 1 and nothing else.
void launch_count_batch(int64_t* num_batches_tracked, cudaStream_t stream);

// The same where `cumulative`: every block of the kernel that writes the statistics reads the
// counter, so it advances behind all of them, and not at all where that kernel can't be launched.
// Else that kernel counts.
void launch_count_after(FinalizeParams const& params, cudaStream_t stream);

}  // namespace cutlass_bn
