// An Op (transform_op.cuh) over a tensor whose planes are large: NCHW.
//
// One 16-byte access of each tensor a thread, in the order of memory, with default caching: as fast
// as a copy. More accesses a thread, streaming hints or long-lived blocks each cost up to a tenth
// of that (docs/notes/2026-11-29-memory-bound-kernels.md).
#pragma once

#include "batch_norm/kernels.h"
#include "batch_norm/transform_op.cuh"
#include "batch_norm/transform_walk.cuh"
#include "common/launch.cuh"

namespace cutlass_bn::batch_norm {

template <int V, class Op>
__global__ void __launch_bounds__(kThreads)
    plane_map_kernel(__grid_constant__ Op const op, __grid_constant__ PlaneVectors const vectors) {
  wait_for_previous_kernel();
  allow_next_kernel();
  int64_t const vector = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (vector >= vectors.count) return;
  Place const place{0, 0, vector * V};
  typename Op::Packets packets;
  op.load(packets, place);
  float map[Op::kCoefficients];
  op.coefficients(vectors.channel_of(vector), map);
  op.store(packets, place, [&](int, int i) { return map[i]; });
}

template <int V, class Op>
void launch_plane_map(Op const& op, ChannelView const& view, cudaStream_t stream) {
  PlaneVectors const vectors = cut_planes(view, V);
  launch_kernel(plane_map_kernel<V, Op>, dim3(static_cast<unsigned>(vectors.blocks())),
                dim3(kThreads), 0, stream, op, vectors);
}

}  // namespace cutlass_bn::batch_norm
