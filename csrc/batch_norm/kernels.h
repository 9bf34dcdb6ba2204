// The launchers of the single kernels, between which layer.cpp chooses. No launcher takes an empty
// input.
//
// Where the layer normalises z = scale * x, dx = scale * dz, and as sums of x - mean are 0,
//   dscale = sum(dz * (x - mean)) = gamma * eps * invstd^3 * sum(dy * (x - mean))
// without cancellation, and exact where scale is 0.
#pragma once

#include <cuda_runtime.h>

#include "batch_norm/on_chip/plan.h"
#include "batch_norm/params.h"
#include "batch_norm/tiling.h"

namespace cutlass_bn::batch_norm {

// partials[tile, c] = (mean, M2) of x over rows [tile, tile + 1) * rows_per_tile of channel c. The
// mean is correctly rounded but for an error of a few 2^-24 standard deviations; a constant channel
// has exactly its value and 0.
//
// y = activation((x - mean) * (gamma * invstd) + beta + residual).
//
// Sums over tiles are in fp32, without atomics: the same input gives the same bits.

// Any view with uses_columns(view) false.
namespace planes {
void launch_stats(StatsParams const& params, cudaStream_t stream);
void launch_transform(TransformParams const& params, cudaStream_t stream);
void launch_gradient_sums(GradientSumsParams const& params, cudaStream_t stream);
void launch_gradient_transform(GradientTransformParams const& params, cudaStream_t stream);
void launch_gradient_scale(GradientScaleParams const& params, cudaStream_t stream);
}  // namespace planes

// Any view with uses_columns(view) true; rows may be padded.
namespace columns {
void launch_stats(StatsParams const& params, cudaStream_t stream);
void launch_transform(TransformParams const& params, cudaStream_t stream);
void launch_gradient_sums(GradientSumsParams const& params, cudaStream_t stream);
void launch_gradient_transform(GradientTransformParams const& params, cudaStream_t stream);
void launch_gradient_scale(GradientScaleParams const& params, cudaStream_t stream);
}  // namespace columns

// Statistics, running buffers and y; dgamma, dbeta and dx. One kernel each, two with a cumulative
// average. False, and nothing done, where the context may not use enough multiprocessors for all
// blocks of a group (a green context): the launchers above do with any number.
namespace on_chip {
[[nodiscard]] bool launch_forward(OnChipForwardParams const& params, OnChipPlan const& plan,
                                  cudaStream_t stream);
[[nodiscard]] bool launch_backward(OnChipBackwardParams const& params, OnChipPlan const& plan,
                                   cudaStream_t stream);
}  // namespace on_chip

// dgamma, dbeta, dscale and the coefficients of dx from sums over tiles, which are merged in fp64.
void launch_gradient_finalize(GradientFinalizeParams const& params, cudaStream_t stream);

// Calls body(TypeTag<T>{}, std::integral_constant<int, V>{}): V elements make 16 bytes, or V = 1
// where that can't be.
template <class Body>
void dispatch_vector(DType dtype, ChannelView const& view, bool aligned, Body&& body) {
  dispatch_dtype(dtype, [&](auto tag) {
    constexpr int kWidth = 16 / static_cast<int>(sizeof(typename decltype(tag)::type));
    if (aligned && is_vectorizable(view, kWidth))
      return body(tag, std::integral_constant<int, kWidth>{});
    return body(tag, std::integral_constant<int, 1>{});
  });
}

}  // namespace cutlass_bn::batch_norm
