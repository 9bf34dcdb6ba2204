// Batch normalisation over the channels of a dense activation. Training: launch_stats, common/finalize.h, launch_transform.
// Eval: launch_transform with running statistics. No launcher takes an empty activation.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "batch_norm/params.h"

namespace cutlass_bn::batch_norm {

// Rows per tile that fill the current device evenly. Depends on nothing but its arguments and the device.
int64_t choose_rows_per_tile(ChannelView const& view, DType dtype);
int64_t choose_rows_per_tile(int64_t rows, int64_t channels, DType dtype);

// partials[tile, c] = (mean, M2) of x over rows [tile, tile + 1) * rows_per_tile of channel c. The mean is correctly rounded but for
// an error of a few 2^-24 standard deviations; a constant channel has exactly its value and 0. One kernel.
void launch_stats(StatsParams const& params, cudaStream_t stream);

// The same for a matrix whose columns are the channels and whose rows may be padded.
void launch_column_moments(ColumnMomentsParams const& params, cudaStream_t stream);

// y = (x - mean) * (weight * invstd) + bias. One kernel.
void launch_transform(TransformParams const& params, cudaStream_t stream);

}  // namespace cutlass_bn::batch_norm
