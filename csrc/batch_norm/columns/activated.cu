// The column kernels where an activation follows, for a matrix: LinearBatchNorm1d's backward.
#include "batch_norm/columns/gradient_sums.cuh"
#include "batch_norm/columns/gradient_transform.cuh"
#include "batch_norm/kernels.h"

namespace cutlass_bn::batch_norm {
namespace {

ChannelView view_of(ActivatedMatrix const& m) { return {m.rows, m.channels, 1, m.x_row_stride}; }

// Calls body(TypeTag<G>{}, TypeTag<T>{}, std::integral_constant<int, V>{},
// std::integral_constant<Activation, ...>{}): V elements of x make 16 bytes, or V = 1 where the
// rows of a tensor can't be accessed so.
template <class Body>
void dispatch(ActivatedMatrix const& m, void const* dx, int64_t dx_row_stride, Body&& body) {
  CUTLASS_BN_CHECK(m.dy_dtype == m.x_dtype || m.dy_dtype == DType::kFloat32, "dy: expected ",
                   name_of(m.x_dtype), " or float32, got ", name_of(m.dy_dtype));
  int64_t const width = 16 / static_cast<int64_t>(size_of(m.dy_dtype));
  bool const aligned = is_aligned(m.dy) && is_aligned(m.x) && is_aligned(dx) &&
                       m.dy_row_stride % width == 0;
  dispatch_dtype(m.x_dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    bool const vectorizable = aligned && dx_row_stride % kVectorWidth<T> == 0 &&
                              is_vectorizable(view_of(m), kVectorWidth<T>);
    auto const with_gradient = [&](auto gradient_tag) {
      dispatch_activation(m.activation, [&](auto activation) {
        return vectorizable ? body(gradient_tag, tag,
                                   std::integral_constant<int, kVectorWidth<T>>{}, activation)
                            : body(gradient_tag, tag, std::integral_constant<int, 1>{}, activation);
      });
    };
    return m.dy_dtype == m.x_dtype ? with_gradient(tag) : with_gradient(TypeTag<float>{});
  });
}

}  // namespace

void columns::launch_activated_sums(ActivatedSumsParams const& p, cudaStream_t stream) {
  ActivatedMatrix const& m = p.matrix;
  dispatch(m, nullptr, 0, [&](auto gradient_tag, auto tag, auto width, auto activation) {
    using G = typename decltype(gradient_tag)::type;
    using T = typename decltype(tag)::type;
    constexpr int V = decltype(width)::value;
    ColumnTiling const tiling = tile_columns(view_of(m), p.rows_per_tile, V,
                                             static_cast<int>(sizeof(G) + sizeof(T)));
    using After = ActivatedValues<decltype(activation)::value>;
    After const after{p.stats, p.scale, p.gamma, p.beta, m.dy_row_stride};
    launch_kernel(column_gradient_sums_kernel<G, T, V, true, After>,
                  dim3(static_cast<unsigned>(tiling.order.blocks())), dim3(kThreads), 0, stream,
                  static_cast<G const*>(m.dy), static_cast<T const*>(m.x),
                  ChannelVector{p.stats, DType::kFloat32}, after, p.partials, m.channels, tiling);
  });
}

void columns::launch_activated_transform(ActivatedTransformParams const& p, cudaStream_t stream) {
  ActivatedMatrix const& m = p.matrix;
  dispatch(m, p.dx, p.dx_row_stride, [&](auto gradient_tag, auto tag, auto width, auto activation) {
    using G = typename decltype(gradient_tag)::type;
    using T = typename decltype(tag)::type;
    constexpr int V = decltype(width)::value;
    ColumnSegments const segments = cut_columns(view_of(m), V);
    using After = ActivatedRows<decltype(activation)::value>;
    After const after{m.dy_row_stride, p.dx_row_stride};
    launch_kernel(column_gradient_transform_kernel<G, T, V, After>,
                  dim3(static_cast<unsigned>(segments.blocks())), dim3(kThreads), 0, stream,
                  static_cast<G const*>(m.dy), static_cast<T const*>(m.x), static_cast<T*>(p.dx),
                  p.maps, after, segments);
  });
}

}  // namespace cutlass_bn::batch_norm
