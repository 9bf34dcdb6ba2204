// Batch normalisation over the channels of a dense activation. Training: launch_stats, common/finalize.h, launch_transform, or,
// where plan_resident finds one, launch_resident_forward. Eval: launch_transform with running statistics. No launcher takes an empty
// activation.
//
// Its backward, with x^ = (x - mean) * invstd and sums over a channel's n rows:
//   dbias = sum(dy), dweight = sum(dy * x^)
//   dx = weight * invstd * (dy - dbias / n - x^ * dweight / n)      in training
//   dx = weight * invstd * dy                                       in eval, where mean and invstd are constants
// launch_gradient_sums, launch_gradient_finalize and, in training, launch_gradient_transform, or launch_resident_gradient for all
// three. In eval dx is launch_transform of dy with the running variance alone. Where the layer normalises z = scale * x, dx = scale * dz, and as sums of x - mean are 0,
//   dscale = sum(dz * (x - mean)) = weight * eps * invstd^3 * sum(dy * (x - mean))
// without cancellation, and exact where scale is 0.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "batch_norm/params.h"
#include "batch_norm/resident.h"

namespace cutlass_bn::batch_norm {

// Rows per tile that fill the current device evenly. Depends on nothing but its arguments and the device.
int64_t choose_rows_per_tile(ChannelView const& view, DType dtype);
int64_t choose_rows_per_tile(int64_t rows, int64_t channels, DType dtype);
int64_t choose_gradient_rows_per_tile(ChannelView const& view, DType dtype, bool with_x);

// partials[tile, c] = (mean, M2) of x over rows [tile, tile + 1) * rows_per_tile of channel c. The mean is correctly rounded but for
// an error of a few 2^-24 standard deviations; a constant channel has exactly its value and 0. One kernel.
void launch_stats(StatsParams const& params, cudaStream_t stream);

// The same for a matrix whose columns are the channels and whose rows may be padded.
void launch_column_moments(ColumnMomentsParams const& params, cudaStream_t stream);

// y = (x - mean) * (weight * invstd) + bias. One kernel.
void launch_transform(TransformParams const& params, cudaStream_t stream);

// Sums over tiles, in fp32, without atomics: the same input gives the same bits. One kernel.
void launch_gradient_sums(GradientSumsParams const& params, cudaStream_t stream);

// dweight, dbias and the coefficients of dx from sums over tiles, which are merged in fp64. One kernel.
void launch_gradient_finalize(GradientFinalizeParams const& params, cudaStream_t stream);

// dx in training. One kernel.
void launch_gradient_transform(GradientTransformParams const& params, cudaStream_t stream);

// Statistics, running buffers and y. One kernel, two with a cumulative average. False, and nothing done, where the context may not
// use enough multiprocessors for all blocks of a group (a green context): the other launchers do with any number.
[[nodiscard]] bool launch_resident_forward(ResidentForwardParams const& params, ResidentPlan const& plan, cudaStream_t stream);

// dweight, dbias and dx in training. One kernel. False as above.
[[nodiscard]] bool launch_resident_gradient(ResidentGradientParams const& params, ResidentPlan const& plan, cudaStream_t stream);

// The sums and the transform of the gradients for the columns of a matrix that are scaled before and activated after the
// normalisation, with dv = dy * act'(v) in place of dy. One kernel each.
void launch_activated_sums(ActivatedSumsParams const& params, cudaStream_t stream);
void launch_activated_transform(ActivatedTransformParams const& params, cudaStream_t stream);

}  // namespace cutlass_bn::batch_norm
