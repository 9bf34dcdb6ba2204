// dx of BatchNorm2d by the column kernel.
#include "batch_norm/columns/gradient_transform.cuh"
#include "batch_norm/kernels.h"

namespace cutlass_bn::batch_norm {

void columns::launch_gradient_transform(GradientTransformParams const& p, cudaStream_t stream) {
  bool const aligned = is_aligned(p.dy) && is_aligned(p.x) && is_aligned(p.dx);
  dispatch_vector(p.dtype, p.view, aligned, [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    constexpr int V = decltype(width)::value;
    ColumnSegments const segments = cut_columns(p.view, V);
    launch_kernel(column_gradient_transform_kernel<T, T, V, SameRows>,
                  dim3(static_cast<unsigned>(segments.blocks())), dim3(kThreads), 0, stream,
                  static_cast<T const*>(p.dy), static_cast<T const*>(p.x), static_cast<T*>(p.dx),
                  p.maps, SameRows{}, segments);
  });
}

}  // namespace cutlass_bn::batch_norm
