// From the transforms' parameters to their Ops. launch(std::integral_constant<int, V>{}, op).
#pragma once

#include "batch_norm/kernels.h"
#include "batch_norm/transform_op.cuh"

namespace cutlass_bn::batch_norm {

template <class Launch>
void dispatch_transform(TransformParams const& p, Launch&& launch) {
  bool const aligned = is_aligned(p.x) && is_aligned(p.residual) && is_aligned(p.y);
  ChannelAffines const maps(p.stats, p.view.channels, p.layer);
  dispatch_vector(p.dtype, p.view, aligned, [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    constexpr int V = decltype(width)::value;
    dispatch_activated<V>(p.layer.activation, [&](auto act) {
      auto const* const x = static_cast<T const*>(p.x);
      auto const* const residual = static_cast<T const*>(p.residual);
      auto* const y = static_cast<T*>(p.y);
      using Act = decltype(act);
      residual == nullptr ? launch(width, ForwardOp<T, V, Act, false>{maps, act, x, residual, y})
                          : launch(width, ForwardOp<T, V, Act, true>{maps, act, x, residual, y});
    });
  });
}

// Of tensors that all lie as the view says.
template <class Launch>
void dispatch_gradient_transform(GradientTransformParams const& p, Launch&& launch) {
  GradientSource const& s = p.source;
  bool const aligned = is_aligned(s.dy) && is_aligned(s.x) && is_aligned(p.dx);
  dispatch_vector(s.dtype, s.view, aligned, [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    constexpr int V = decltype(width)::value;
    dispatch_activated<V>(s.layer.activation, [&](auto act) {
      launch(width, GradientOp<T, T, V, decltype(act), false>{
                        p.maps, act, static_cast<T const*>(s.dy), static_cast<T const*>(s.x),
                        static_cast<T*>(p.dx), 0, 0});
    });
  });
}

template <class Launch>
void dispatch_gradient_scale(GradientScaleParams const& p, Launch&& launch) {
  GradientSource const& s = p.source;
  bool const aligned = is_aligned(s.dy) && is_aligned(s.x) && is_aligned(s.saved) &&
                       is_aligned(p.dv) && is_aligned(p.dx);
  dispatch_vector(s.dtype, s.view, aligned, [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    launch(width,
           ScaleOp<T, decltype(width)::value>{
               ChannelAffines(s.stats, s.view.channels, s.layer), AnyActivation{s.layer.activation},
               s.saved_as(), static_cast<T const*>(s.dy), static_cast<T const*>(s.x),
               static_cast<T const*>(s.saved), static_cast<T*>(p.dv), static_cast<T*>(p.dx)});
  });
}

}  // namespace cutlass_bn::batch_norm
