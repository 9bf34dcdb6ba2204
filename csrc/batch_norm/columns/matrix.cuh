// Of the gradients' launchers: dy, and dx, of a matrix (LinearBatchNorm1d's) have a dtype or row
// strides of their own.
#pragma once

#include "batch_norm/kernels.h"
#include "common/packet.cuh"

namespace cutlass_bn::batch_norm {

// Calls body(TypeTag<G>{}, TypeTag<T>{}, std::integral_constant<int, V>{}): V elements of x make 16
// bytes, or V = 1 where the rows of a tensor can't be accessed so. aligned: those that are not of s
// can.
template <class Body>
void dispatch_matrix(GradientSource const& s, bool aligned, Body&& body) {
  bool const same = s.dy_dtype == s.dtype;
  CUTLASS_BN_CHECK(same || s.dy_dtype == DType::kFloat32, "dy: expected ", name_of(s.dtype),
                   " or float32, got ", name_of(s.dy_dtype));
  CUTLASS_BN_CHECK(same || s.saved == nullptr, "dy: expected ", name_of(s.dtype), ", got ",
                   name_of(s.dy_dtype));
  aligned = aligned && is_aligned(s.dy) && is_aligned(s.x) && is_aligned(s.saved) &&
            s.dy_row_stride * static_cast<int64_t>(size_of(s.dy_dtype)) % 16 == 0;
  dispatch_vector(s.dtype, s.view, aligned, [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) < sizeof(float)) {
      if (!same) return body(TypeTag<float>{}, tag, width);
    }
    return body(tag, tag, width);
  });
}

}  // namespace cutlass_bn::batch_norm
