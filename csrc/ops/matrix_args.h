// From torch's arguments to those of the GEMMs and of what is around them.
#pragma once

#include "linear_bn/layer.h"
#include "ops/tensor_args.h"

namespace cutlass_bn::ops {

inline linear_bn::MatrixView view_of(Tensor const& t) {
  return {t.const_data_ptr(), t.size(0), t.size(1), t.stride(0), t.stride(1)};
}

inline Activation activation_of(int64_t code) {
  CUTLASS_BN_CHECK(code >= 0 && code <= static_cast<int64_t>(Activation::kLeakyRelu),
                   "activation: expected 0 (none), 1 (relu), 2 (gelu), 3 (silu) or 4 (leaky_relu), got ", code);
  return static_cast<Activation>(code);
}

// Row stride of u and of its gradient, in elements: whole 16-byte vectors, so that every N can be
// stored by TMA.
inline int64_t padded_row(int64_t n, DType dtype) {
  return round_up(n, 16 / static_cast<int64_t>(size_of(dtype)));
}

// [m, n] in padded rows, whole in memory: cuBLAS reads to the end of the last one.
inline Tensor empty_padded(int64_t m, int64_t n, ScalarType dtype, Tensor const& like) {
  int64_t const ld = padded_row(n, dtype_of(dtype, "result"));
  Tensor const rows = empty_strided({m, ld}, {ld, 1}, dtype, like.get_device_index());
  return ld == n ? rows : with_strides(rows, {m, n}, {ld, 1});
}

inline bool has_dense_rows(Tensor const& matrix) {
  return matrix.size(1) <= 1 || matrix.stride(1) == 1;
}

inline void check_dense_rows(Tensor const& matrix, char const* name) {
  CUTLASS_BN_CHECK(has_dense_rows(matrix), name,
                   ": expected contiguous rows, got a column stride of ", matrix.stride(1));
}

}  // namespace cutlass_bn::ops
