// dx, and dv where no sums are needed, by the column kernel.
#include "batch_norm/columns/map.cuh"
#include "batch_norm/columns/matrix.cuh"
#include "batch_norm/transform_launch.cuh"

namespace cutlass_bn::batch_norm {

void columns::launch_gradient_transform(GradientTransformParams const& p, cudaStream_t stream) {
  GradientSource const& s = p.source;
  int64_t const row_stride = s.view.outer_stride;
  if (s.dy_dtype == s.dtype && s.dy_row_stride == row_stride && p.dx_row_stride == row_stride) {
    return dispatch_gradient_transform(
        p, [&](auto width, auto const& op) { launch_column_map<width>(op, s.view, stream); });
  }
  bool const aligned = is_aligned(p.dx) &&
                       p.dx_row_stride * static_cast<int64_t>(size_of(s.dtype)) % 16 == 0;
  dispatch_matrix(s, aligned, [&](auto gradient_tag, auto tag, auto width) {
    using G = typename decltype(gradient_tag)::type;
    using T = typename decltype(tag)::type;
    constexpr int V = decltype(width)::value;
    dispatch_activated<V>(s.layer.activation, [&](auto act) {
      launch_column_map<V>(
          GradientOp<G, T, V, decltype(act), true>{
              p.maps, act, static_cast<G const*>(s.dy), static_cast<T const*>(s.x),
              static_cast<T*>(p.dx), s.dy_row_stride, p.dx_row_stride},
          s.view, stream);
    });
  });
}

void columns::launch_gradient_scale(GradientScaleParams const& p, cudaStream_t stream) {
  dispatch_gradient_scale(
      p, [&](auto width, auto const& op) { launch_column_map<width>(op, p.source.view, stream); });
}

}  // namespace cutlass_bn::batch_norm
