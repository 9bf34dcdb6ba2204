// y = activation((x - mean) * (gamma * invstd) + beta + residual) where planes are large.
#include "batch_norm/planes/map.cuh"
#include "batch_norm/transform_launch.cuh"

namespace cutlass_bn::batch_norm {

void planes::launch_transform(TransformParams const& p, cudaStream_t stream) {
  dispatch_transform(
      p, [&](auto width, auto const& op) { launch_plane_map<width>(op, p.view, stream); });
}

}  // namespace cutlass_bn::batch_norm
