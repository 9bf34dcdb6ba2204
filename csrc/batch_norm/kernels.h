// The launchers of the single kernels, between which launch.cu chooses.
#pragma once

#include <cuda_runtime.h>

#include "batch_norm/params.h"
#include "batch_norm/tiling.h"

namespace cutlass_bn::batch_norm {

// Any view with uses_columns(view) false.
void launch_plane_stats(StatsParams const& params, cudaStream_t stream);
void launch_plane_transform(TransformParams const& params, cudaStream_t stream);
void launch_plane_gradient_sums(GradientSumsParams const& params, cudaStream_t stream);
void launch_plane_gradient_transform(GradientTransformParams const& params, cudaStream_t stream);

// Any view with uses_columns(view) true.
void launch_column_stats(StatsParams const& params, cudaStream_t stream);
void launch_column_transform(TransformParams const& params, cudaStream_t stream);
void launch_column_gradient_sums(GradientSumsParams const& params, cudaStream_t stream);
void launch_column_gradient_transform(GradientTransformParams const& params, cudaStream_t stream);

// Calls body(TypeTag<T>{}, std::integral_constant<int, V>{}): V elements make 16 bytes, or V = 1 where that can't be.
template <class Body>
void dispatch_vector(DType dtype, ChannelView const& view, bool aligned, Body&& body) {
  dispatch_dtype(dtype, [&](auto tag) {
    constexpr int kWidth = 16 / static_cast<int>(sizeof(typename decltype(tag)::type));
    if (aligned && is_vectorizable(view, kWidth)) return body(tag, std::integral_constant<int, kWidth>{});
    return body(tag, std::integral_constant<int, 1>{});
  });
}

}  // namespace cutlass_bn::batch_norm
