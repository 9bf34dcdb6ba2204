// y = activation((x - mean) * (gamma * invstd) + beta + residual) by the column kernel.
#include "batch_norm/columns/map.cuh"
#include "batch_norm/transform_launch.cuh"

namespace cutlass_bn::batch_norm {

void columns::launch_transform(TransformParams const& p, cudaStream_t stream) {
  dispatch_transform(
      p, [&](auto width, auto const& op) { launch_column_map<width>(op, p.view, stream); });
}

}  // namespace cutlass_bn::batch_norm
