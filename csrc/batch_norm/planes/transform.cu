// y = (x - mean) * (gamma * invstd) + beta where planes are large: NCHW.
//
// One 16-byte access a thread, in the order of memory, with default caching: as fast as a copy.
// More accesses a thread, streaming hints or long-lived blocks each cost up to a tenth of that
// (docs/notes/2026-11-29-memory-bound-kernels.md).
#include "batch_norm/channel_affines.cuh"
#include "batch_norm/kernels.h"
#include "batch_norm/transform_walk.cuh"
#include "common/launch.cuh"
#include "common/packet.cuh"

namespace cutlass_bn::batch_norm {
namespace {

template <class T, int V>
__global__ void __launch_bounds__(kThreads)
    plane_transform_kernel(T const* x, T* y, __grid_constant__ ChannelAffines const maps,
                           __grid_constant__ PlaneVectors const vectors) {
  wait_for_previous_kernel();
  allow_next_kernel();
  int64_t const vector = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (vector >= vectors.count) return;
  Packet<T, V> values;
  values.load(x + vector * V);
  Affine const map = maps.at(vectors.channel_of(vector));
  values.transform([&](int, float v) { return map(v); });
  values.store(y + vector * V);
}

}  // namespace

void planes::launch_transform(TransformParams const& p, cudaStream_t stream) {
  dispatch_vector(p.dtype, p.view, is_aligned(p.x) && is_aligned(p.y), [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    constexpr int V = decltype(width)::value;
    PlaneVectors const vectors = cut_planes(p.view, V);
    launch_kernel(plane_transform_kernel<T, V>, dim3(static_cast<unsigned>(vectors.blocks())),
                  dim3(kThreads), 0, stream, static_cast<T const*>(p.x), static_cast<T*>(p.y),
                  ChannelAffines(p), vectors);
  });
}

}  // namespace cutlass_bn::batch_norm
