// From torch tensors to the GEMMs' operands.
#pragma once

#include "linear_bn/dispatch.h"
#include "ops/tensor_args.h"

namespace cutlass_bn::ops {

inline linear_bn::MatrixView view_of(Tensor const& t) {
  return {t.const_data_ptr(), t.size(0), t.size(1), t.stride(0), t.stride(1)};
}

inline Tensor split_workspace(linear_bn::SplitOperands const& operands, Tensor const& input) {
  return empty({linear_bn::split_workspace_bytes(operands)}, ScalarType::Byte, input);
}

}  // namespace cutlass_bn::ops
