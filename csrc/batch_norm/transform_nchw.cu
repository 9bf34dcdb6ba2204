// y = (x - mean) * (weight * invstd) + bias where planes are large: NCHW.
//
// One 16-byte access a thread, in the order of memory, with default caching: as fast as a copy. More accesses a thread, streaming
// hints or long-lived blocks each cost up to a tenth of that (docs/performance.md).
#include "batch_norm/channel_map.cuh"
#include "batch_norm/kernels.h"
#include "batch_norm/launch.h"
#include "common/launch.cuh"
#include "common/packet.cuh"

namespace cutlass_bn::batch_norm {
namespace {

constexpr int kTransformThreads = 256;

struct Planes {
  int64_t vectors;        // of the whole tensor
  int64_t plane_vectors;  // of one plane
  double per_plane;       // 1 / plane_vectors
  FastDivisor channels;

  // The plane that a vector is in. Exact: the estimate is off by one at most, as vector numbers are far below 2^53.
  __device__ __forceinline__ uint32_t plane_of(int64_t vector) const {
    int64_t const plane = static_cast<int64_t>(double(vector) * per_plane);
    int64_t const within = vector - plane * plane_vectors;
    return static_cast<uint32_t>(within < 0 ? plane - 1 : within >= plane_vectors ? plane + 1 : plane);
  }
};

template <class T, int V>
__global__ void __launch_bounds__(kTransformThreads)
    plane_transform_kernel(T const* x, T* y, __grid_constant__ ChannelMapParams const maps, __grid_constant__ Planes const planes) {
  wait_for_previous_kernel();
  allow_next_kernel();
  int64_t const vector = int64_t(blockIdx.x) * kTransformThreads + threadIdx.x;
  if (vector >= planes.vectors) return;
  Packet<T, V> values;
  values.load(x + vector * V);
  uint32_t const plane = planes.plane_of(vector);
  ChannelMap const map = maps.at(plane - planes.channels.quotient(plane) * planes.channels.divisor);
  values.transform([&](int, float v) { return map(v); });
  values.store(y + vector * V);
}

}  // namespace

void launch_plane_transform(TransformParams const& p, cudaStream_t stream) {
  dispatch_vector(p.dtype, p.view, is_aligned(p.x) && is_aligned(p.y), [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    constexpr int V = decltype(width)::value;
    int64_t const plane_count = p.view.outer * p.view.channels, plane_vectors = p.view.inner / V;
    int64_t const blocks = ceil_div(plane_count * plane_vectors, kTransformThreads);
    CUTLASS_BN_CHECK(blocks <= INT32_MAX && plane_count <= INT32_MAX, "input: too large, ", plane_count, " planes of ",
                     p.view.inner);
    Planes const planes{plane_count * plane_vectors, plane_vectors, 1.0 / double(plane_vectors),
                        FastDivisor(static_cast<uint32_t>(p.view.channels))};
    launch_kernel(plane_transform_kernel<T, V>, dim3(static_cast<unsigned>(blocks)), dim3(kTransformThreads), 0, stream,
                  static_cast<T const*>(p.x), static_cast<T*>(p.y), ChannelMapParams(p), planes);
  });
}

}  // namespace cutlass_bn::batch_norm
