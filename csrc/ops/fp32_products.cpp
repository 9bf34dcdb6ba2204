// What float32 matrix products of a backward pass are made of, as ops of their own: the parts of
// the split GEMM, and the transpose that TF32 wants.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "common/device_info.h"
#include "linear_bn/transpose.h"
#include "ops/matrix_args.h"

namespace cutlass_bn::ops {
namespace {

using linear_bn::MatrixView;
using linear_bn::SplitSource;
using torch::stable::accelerator::DeviceGuard;

// Less than in a forward: beside a backward's products there are y, u and their gradients.
constexpr int64_t kBackwardPlaneBytes = linear_bn::kMaxPlaneBytes / 2;

void check_float_matrix(Tensor const& t, char const* name) {
  check_cuda(t, name);
  CUTLASS_BN_CHECK(t.dim() == 2, name, ": expected 2 dimensions, got shape ", shape_of(t));
  DType const dtype = dtype_of(t, name);
  CUTLASS_BN_CHECK(dtype == DType::kFloat32, name, ": expected float32, got ", name_of(dtype));
}

SplitSource source_of(MatrixView const& view, char const* name) {
  auto const source = linear_bn::split_source(view);
  CUTLASS_BN_CHECK(source.has_value(), name,
                   ": expected contiguous rows or columns without overlap, got strides ",
                   view.row_stride, ", ", view.column_stride);
  return *source;
}

MatrixView transposed(MatrixView const& m) {
  return {m.data, m.columns, m.rows, m.column_stride, m.row_stride};
}

std::tuple<Tensor, Tensor, Tensor> split_fp32(Tensor const& matrix, bool transpose) {
  check_float_matrix(matrix, "matrix");
  MatrixView const view = view_of(matrix);
  SplitSource const source = source_of(transpose ? transposed(view) : view, "matrix");
  DeviceGuard const guard(matrix.get_device_index());
  linear_bn::SplitMatrix split;
  split.rows = source.rows;
  split.k = source.k;
  split.ld = linear_bn::split_ld(source.k);
  Tensor const planes = empty({2, split.rows, split.ld}, ScalarType::Half, matrix);
  Tensor const exponents = empty({split.rows}, ScalarType::Int, matrix);
  Tensor const census = empty({split.rows}, ScalarType::Int, matrix);
  split.census = static_cast<uint32_t*>(census.mutable_data_ptr());
  split.planes = planes.mutable_data_ptr();
  split.exponents = static_cast<int32_t*>(exponents.mutable_data_ptr());
  WorkspaceMemory const scratch(linear_bn::split_scratch_bytes(source), matrix);
  linear_bn::launch_split(source, split, scratch.data(), current_stream(matrix));
  return {planes, exponents, census};
}

Tensor split_matmul(Tensor const& a, Tensor const& b) {
  check_float_matrix(a, "a");
  check_on_device_of(b, "b", a);
  check_float_matrix(b, "b");
  int64_t const m = a.size(0), n = b.size(1), k = a.size(1);
  CUTLASS_BN_CHECK(b.size(0) == k, "b: expected shape [", k, ", N], got ", shape_of(b));
  CUTLASS_BN_CHECK(
      m <= gemm::kMaxDimension && n <= gemm::kMaxDimension && k <= linear_bn::kMaxSplitK,
      "a, b: expected M and N below 2^31 and K below 2^30, got ", shape_of(a), " and ",
      shape_of(b));
  DeviceGuard const guard(a.get_device_index());
  cudaStream_t const stream = current_stream(a);
  Tensor const out = empty_padded(m, n, ScalarType::Float, a);
  if (m == 0 || n == 0) return out;
  auto* const data = static_cast<float*>(out.mutable_data_ptr());
  if (k == 0) {
    CUTLASS_BN_CUDA(
        cudaMemsetAsync(data, 0, m * padded_row(n, DType::kFloat32) * sizeof(float), stream));
    return out;
  }
  linear_bn::SplitOperands operands{source_of(view_of(a), "a"),
                                    source_of(transposed(view_of(b)), "b")};
  operands.w_in_blocks = n > m;
  operands.max_plane_bytes = kBackwardPlaneBytes;
  WorkspaceMemory const workspace(linear_bn::split_workspace_bytes(operands), a);
  gemm::ProductParams params;
  params.out = data;
  params.ldo = padded_row(n, DType::kFloat32);
  params.tile = linear_bn::choose_split_tile(operands, device_info().sm_count);
  linear_bn::launch_split_product(operands, params, workspace.data(), stream);
  return out;
}

Tensor transpose_fp32(Tensor const& matrix) {
  check_float_matrix(matrix, "matrix");
  check_dense_rows(matrix, "matrix");
  DeviceGuard const guard(matrix.get_device_index());
  Tensor const result = empty_padded(matrix.size(1), matrix.size(0), ScalarType::Float, matrix);
  linear_bn::TransposeParams params;
  params.x = static_cast<float const*>(matrix.const_data_ptr());
  params.y = static_cast<float*>(result.mutable_data_ptr());
  params.rows = matrix.size(0);
  params.columns = matrix.size(1);
  params.ldx = matrix.stride(0);
  params.ldy = result.stride(0);
  linear_bn::launch_transpose(params, current_stream(matrix));
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cutlass_bn, CUDA, m) {
  m.impl("split_fp32", TORCH_BOX(&split_fp32));
  m.impl("split_matmul", TORCH_BOX(&split_matmul));
  m.impl("transpose_fp32", TORCH_BOX(&transpose_fp32));
}

}  // namespace cutlass_bn::ops
