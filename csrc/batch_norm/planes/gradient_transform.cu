// dx, and dv where no sums are needed, where planes are large: NCHW.
#include "batch_norm/planes/map.cuh"
#include "batch_norm/transform_launch.cuh"

namespace cutlass_bn::batch_norm {

void planes::launch_gradient_transform(GradientTransformParams const& p, cudaStream_t stream) {
  dispatch_gradient_transform(
      p, [&](auto width, auto const& op) { launch_plane_map<width>(op, p.source.view, stream); });
}

void planes::launch_gradient_scale(GradientScaleParams const& p, cudaStream_t stream) {
  dispatch_gradient_scale(
      p, [&](auto width, auto const& op) { launch_plane_map<width>(op, p.source.view, stream); });
}

}  // namespace cutlass_bn::batch_norm
