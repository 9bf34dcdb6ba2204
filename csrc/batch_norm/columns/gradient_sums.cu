// The sums of the backward in the column kernel.
#include "batch_norm/columns/gradient_sums.cuh"
#include "batch_norm/columns/matrix.cuh"

namespace cutlass_bn::batch_norm {

void columns::launch_gradient_sums(GradientSumsParams const& p, cudaStream_t stream) {
  GradientSource const& s = p.source;
  dispatch_matrix(s, is_aligned(p.dv), [&](auto gradient_tag, auto tag, auto width) {
    using G = typename decltype(gradient_tag)::type;
    using T = typename decltype(tag)::type;
    constexpr int V = decltype(width)::value;
    dispatch_derivative<V, sizeof(G) == sizeof(T)>(s, [&](auto derivative) {
      using Of = decltype(derivative);
      ColumnTiling tiling = tile_columns(
          s.view, p.rows_per_tile, V, static_cast<int>(sizeof(G) + (Of::kTensors - 1) * sizeof(T)));
      // Where dv is stored, blocks that run together write close to each other.
      if (Of::kReadsSaved)
        tiling.group = std::max<int32_t>(
            1, tiling.order.slots / static_cast<int32_t>(tiling.order.lanes));
      ColumnGradients<G, T> const gradients{static_cast<G const*>(s.dy),
                                            static_cast<T const*>(s.x),
                                            static_cast<T const*>(s.saved),
                                            static_cast<T*>(p.dv),
                                            s.dy_row_stride,
                                            p.partials,
                                            ChannelAffines(s.stats, s.view.channels, s.layer)};
      launch_kernel(column_gradient_sums_kernel<G, T, V, Of>,
                    dim3(static_cast<unsigned>(tiling.order.blocks())), dim3(kThreads), 0, stream,
                    gradients, derivative, tiling);
    });
  });
}

}  // namespace cutlass_bn::batch_norm
