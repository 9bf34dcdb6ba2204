#include "ops/product.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "common/device_info.h"
#include "linear_bn/transpose.h"

namespace cutlass_bn::ops {
namespace {

using linear_bn::Fp32Products;
using linear_bn::MatrixView;
using linear_bn::ProductPath;
using linear_bn::SplitSource;
using torch::stable::accelerator::DeviceGuard;

// Less than in a forward: beside a backward's products there are y, u and their gradients.
constexpr int64_t kBackwardPlaneBytes = linear_bn::kMaxPlaneBytes / 2;

class NoGradGuard {
 public:
  NoGradGuard() { aoti_torch_grad_mode_set_enabled(false); }
  ~NoGradGuard() { aoti_torch_grad_mode_set_enabled(enabled_); }
  NoGradGuard(NoGradGuard const&) = delete;
  NoGradGuard& operator=(NoGradGuard const&) = delete;

 private:
  bool enabled_ = aoti_torch_grad_mode_is_enabled();
};

Tensor as_contiguous(Tensor const& matrix) {
  if (matrix.is_contiguous()) return matrix;
  Tensor copy = empty({matrix.size(0), matrix.size(1)}, matrix.scalar_type(), matrix);
  torch::stable::copy_(copy, matrix);
  return copy;
}

// matrix itself where the split can read it; copy keeps what it reads else.
SplitSource source_of(Tensor const& matrix, bool transpose, std::optional<Tensor>& copy) {
  auto const read = [transpose](Tensor const& t) {
    MatrixView const m = view_of(t);
    return linear_bn::split_source(
        transpose ? MatrixView{m.data, m.columns, m.rows, m.column_stride, m.row_stride} : m);
  };
  if (auto const source = read(matrix)) return *source;
  copy = as_contiguous(matrix);
  return *read(*copy);
}

Tensor split_product(Tensor const& a, Tensor const& b) {
  int64_t const m = a.size(0), n = b.size(1);
  cudaStream_t const stream = current_stream(a);
  Tensor const out = empty_padded(m, n, a);
  std::optional<Tensor> copy_of_a, copy_of_b;
  linear_bn::SplitOperands operands{source_of(a, false, copy_of_a), source_of(b, true, copy_of_b)};
  operands.w_in_blocks = n > m;
  operands.max_plane_bytes = kBackwardPlaneBytes;
  WorkspaceMemory const workspace(linear_bn::split_workspace_bytes(operands), a);
  gemm::ProductParams params;
  params.out = static_cast<float*>(out.mutable_data_ptr());
  params.ldo = out.stride(0);
  params.tile = linear_bn::choose_split_tile(operands, device_info().sm_count);
  linear_bn::launch_split_product(operands, params, workspace.data(), stream);
  return as_contiguous(out);
}

// Written out, of a float32 matrix with dense rows.
Tensor transposed_copy(Tensor const& matrix) {
  Tensor const result = empty_padded(matrix.size(1), matrix.size(0), matrix);
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

void check_float_matrix(Tensor const& t, char const* name) {
  CUTLASS_BN_CHECK(t.dim() == 2, name, ": expected 2 dimensions, got shape ", shape_of(t));
  DType const dtype = dtype_of(t, name);
  CUTLASS_BN_CHECK(dtype == DType::kFloat32, name, ": expected float32, got ", name_of(dtype));
}

// always_split: however small the matrices are.
Tensor fp32_matmul(Tensor const& a, Tensor const& b, int64_t fp32_products, bool always_split) {
  check_cuda(a, "a");
  check_float_matrix(a, "a");
  check_on_device_of(b, "b", a);
  check_float_matrix(b, "b");
  int64_t const m = a.size(0), n = b.size(1), k = a.size(1);
  CUTLASS_BN_CHECK(b.size(0) == k, "b: expected shape [", k, ", N], got ", shape_of(b));
  auto const products = fp32_products_of(fp32_products);
  DeviceGuard const guard(a.get_device_index());
  if (!always_split || m == 0 || n == 0 || k == 0) return product(a, b, products);
  CUTLASS_BN_CHECK(
      m <= gemm::kMaxDimension && n <= gemm::kMaxDimension && k <= linear_bn::kMaxSplitK,
      "a, b: expected M and N below 2^31 and K below 2^30, got ", shape_of(a), " and ",
      shape_of(b));
  return split_product(a, b);
}

}  // namespace

MatrixView view_of(Tensor const& t) {
  return {t.const_data_ptr(), t.size(0), t.size(1), t.stride(0), t.stride(1)};
}

Tensor transposed(Tensor const& matrix) {
  return with_strides(matrix, {matrix.size(1), matrix.size(0)},
                      {matrix.stride(1), matrix.stride(0)});
}

Tensor empty_padded(int64_t m, int64_t n, Tensor const& like) {
  int64_t const vector = 16 / static_cast<int64_t>(size_of(dtype_of(like, "result"))),
                ld = round_up(n, vector);
  Tensor const rows = empty_strided({m, ld}, {ld, 1}, like.scalar_type(), like.get_device_index());
  return ld == n ? rows : with_strides(rows, {m, n}, {ld, 1});
}

Fp32Products fp32_products_of(int64_t code) {
  CUTLASS_BN_CHECK(code >= 0 && code <= static_cast<int64_t>(Fp32Products::kSplit),
                   "fp32_products: expected 0 (IEEE), 1 (TF32) or 2 (split), got ", code);
  return static_cast<Fp32Products>(code);
}

void multiply_by_torch(Tensor const& out, Tensor const& a, Tensor const& b,
                       std::optional<Tensor> const& bias) {
  NoGradGuard const no_grad;
  auto const error = bias ? aoti_torch_cuda_addmm_out(out.get(), bias->get(), a.get(), b.get(), 1.0,
                                                      1.0)
                          : aoti_torch_cuda_mm_out(out.get(), a.get(), b.get());
  CUTLASS_BN_CHECK(error == AOTI_TORCH_SUCCESS, "torch could not multiply ", shape_of(a), " and ",
                   shape_of(b));
}

Tensor product(Tensor const& a, Tensor const& b, Fp32Products fp32_products) {
  auto path = ProductPath::kPlain;
  if (a.scalar_type() == ScalarType::Float) {
    path = linear_bn::choose_product(view_of(a), view_of(b), fp32_products,
                                     device_info().compute_capability);
  }
  if (path == ProductPath::kSplit) return split_product(a, b);
  Tensor const out = empty({a.size(0), b.size(1)}, a.scalar_type(), a);
  Tensor const left = path == ProductPath::kTransposeA ? transposed_copy(transposed(a)) : a;
  Tensor const right = path == ProductPath::kTransposeB ? transposed(transposed_copy(b)) : b;
  multiply_by_torch(out, left, right, std::nullopt);
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(cutlass_bn, CUDA, m) { m.impl("fp32_matmul", TORCH_BOX(&fp32_matmul)); }

}  // namespace cutlass_bn::ops
