// BatchNorm2d's sums in the column kernel.
#include "batch_norm/columns/gradient_sums.cuh"
#include "batch_norm/kernels.h"

namespace cutlass_bn::batch_norm {

void columns::launch_gradient_sums(GradientSumsParams const& p, cudaStream_t stream) {
  dispatch_vector(p.dtype, p.view, is_aligned(p.dy) && is_aligned(p.x), [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    constexpr int V = decltype(width)::value;
    int const tensors = p.x == nullptr ? 1 : 2;
    ColumnTiling const tiling = tile_columns(p.view, p.rows_per_tile, V,
                                             tensors * static_cast<int>(sizeof(T)));
    auto const launch = [&](auto kernel) {
      launch_kernel(kernel, dim3(static_cast<unsigned>(tiling.order.blocks())), dim3(kThreads), 0,
                    stream, static_cast<T const*>(p.dy), static_cast<T const*>(p.x), p.mean,
                    SameValues{}, p.partials, p.view.channels, tiling);
    };
    p.x == nullptr ? launch(column_gradient_sums_kernel<T, T, V, false, SameValues>)
                   : launch(column_gradient_sums_kernel<T, T, V, true, SameValues>);
  });
}

}  // namespace cutlass_bn::batch_norm
