// dx of the training backward where planes are large: NCHW. One 16-byte access of each tensor a
// thread, in the order of memory, as in transform.cu.
#include "batch_norm/gradient_map.cuh"
#include "batch_norm/kernels.h"
#include "batch_norm/transform_walk.cuh"
#include "common/launch.cuh"
#include "common/packet.cuh"

namespace cutlass_bn::batch_norm {
namespace {

template <class T, int V>
__global__ void __launch_bounds__(kThreads)
    plane_gradient_transform_kernel(T const* dy, T const* x, T* dx,
                                    __grid_constant__ GradientMaps const maps,
                                    __grid_constant__ PlaneVectors const vectors) {
  wait_for_previous_kernel();
  allow_next_kernel();
  int64_t const vector = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (vector >= vectors.count) return;
  Packet<T, V> gradients, values;
  gradients.load(dy + vector * V);
  values.load(x + vector * V);
  GradientMap const map = load_map(maps, vectors.channel_of(vector));
  gradients.transform([&](int v, float gradient) { return map(gradient, values[v]); });
  gradients.store(dx + vector * V);
}

}  // namespace

void planes::launch_gradient_transform(GradientTransformParams const& p, cudaStream_t stream) {
  bool const aligned = is_aligned(p.dy) && is_aligned(p.x) && is_aligned(p.dx);
  dispatch_vector(p.dtype, p.view, aligned, [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    constexpr int V = decltype(width)::value;
    PlaneVectors const vectors = cut_planes(p.view, V);
    launch_kernel(plane_gradient_transform_kernel<T, V>,
                  dim3(static_cast<unsigned>(vectors.blocks())), dim3(kThreads), 0, stream,
                  static_cast<T const*>(p.dy), static_cast<T const*>(p.x), static_cast<T*>(p.dx),
                  p.maps, vectors);
  });
}

}  // namespace cutlass_bn::batch_norm
