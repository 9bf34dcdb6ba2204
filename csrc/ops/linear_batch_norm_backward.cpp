// Gradients of the layer's training forward. Arguments are checked before anything is allocated or
// launched.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "linear_bn/layer.h"
#include "ops/channel_view.h"
#include "ops/product.h"

namespace cutlass_bn::ops {
namespace {

using torch::stable::accelerator::DeviceGuard;

// dinput, dweight, dbias, dscale, dgamma, dbeta; empty where not asked for.
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Tensor with_dense_rows(Tensor const& matrix) {
  if (matrix.size(1) <= 1 || matrix.stride(1) == 1) return matrix;
  Tensor copy = empty({matrix.size(0), matrix.size(1)}, matrix.scalar_type(), matrix);
  torch::stable::copy_(copy, matrix);
  return copy;
}

void check_operand(Tensor const& t, char const* name, Tensor const& u,
                   std::initializer_list<int64_t> shape) {
  check_on_device_of(t, name, u);
  check_shape(t, name, shape);
  CUTLASS_BN_CHECK(t.scalar_type() == u.scalar_type(), name, ": expected ",
                   name_of(dtype_of(u, "u")), " like u, got ", name_of(dtype_of(t, name)));
}

Gradients linear_batch_norm_backward(
    Tensor const& any_grad, Tensor const& input, Tensor const& weight, Tensor const& u,
    Tensor const& stats, std::optional<Tensor> const& scale, std::optional<Tensor> const& gamma,
    std::optional<Tensor> const& beta, double eps, int64_t activation, int64_t fp32_products,
    bool input_grad, bool weight_grad, std::optional<ScalarType> bias_grad,
    std::optional<ScalarType> scale_grad, std::optional<ScalarType> gamma_grad,
    std::optional<ScalarType> beta_grad) {
  check_cuda(u, "u");
  CUTLASS_BN_CHECK(u.dim() == 2, "u: expected 2 dimensions, got shape ", shape_of(u));
  CUTLASS_BN_CHECK(u.size(1) <= 1 || u.stride(1) == 1,
                   "u: expected contiguous rows, got a column stride of ", u.stride(1));
  CUTLASS_BN_CHECK(input.dim() == 2, "input: expected 2 dimensions, got shape ", shape_of(input));
  int64_t const m = u.size(0), n = u.size(1), k = input.size(1);
  check_operand(input, "input", u, {m, k});
  check_operand(weight, "weight", u, {n, k});
  DType const dtype = dtype_of(u, "u"), grad_dtype = dtype_of(any_grad, "grad");
  check_on_device_of(any_grad, "grad", u);
  check_shape(any_grad, "grad", {m, n});
  CUTLASS_BN_CHECK(grad_dtype == dtype || grad_dtype == DType::kFloat32, "grad: expected ",
                   name_of(dtype), " like u or float32, got ", name_of(grad_dtype));
  auto const products = fp32_products_of(fp32_products);
  for (auto const& asked : {bias_grad, scale_grad, gamma_grad, beta_grad}) {
    if (asked) dtype_of(*asked, "dtype of a gradient");
  }
  linear_bn::BackwardParams params;
  params.stats = stats_data(stats, n, u);
  params.layer.scale = channel_vector(scale, "scale", n, u);
  params.layer.gamma = channel_vector(gamma, "gamma", n, u);
  params.layer.beta = channel_vector(beta, "beta", n, u);
  params.layer.eps = eps;
  params.layer.activation = activation_of(activation);

  DeviceGuard const guard(u.get_device_index());
  cudaStream_t const stream = current_stream(u);
  bool const u_grad = input_grad || weight_grad;
  auto const nothing = [&u] { return empty({0}, u.scalar_type(), u); };
  VectorGradient const dbias(bias_grad, n, u), dscale(scale_grad, n, u), dgamma(gamma_grad, n, u),
      dbeta(beta_grad, n, u);
  bool const any = u_grad || scale_grad || gamma_grad || beta_grad;
  if (m == 0 || n == 0 || !any) {
    for (VectorGradient const* vector : {&dbias, &dscale, &dgamma, &dbeta})
      fill_with_zeros(vector->tensor, stream);
  }
  Tensor const du = u_grad ? empty_padded(m, n, u) : nothing();
  if (m != 0 && n != 0 && any) {
    Tensor const grad = with_dense_rows(any_grad);
    params.dy = grad.const_data_ptr();
    params.u = u.const_data_ptr();
    params.du = u_grad ? du.mutable_data_ptr() : nullptr;
    params.m = m;
    params.n = n;
    params.dy_dtype = grad_dtype;
    params.dtype = dtype;
    params.dy_row_stride = grad.stride(0);
    params.u_row_stride = u.stride(0);
    params.du_row_stride = u_grad ? du.stride(0) : 0;
    params.dbias = dbias.vector;
    params.dscale = dscale.vector;
    params.dgamma = dgamma.vector;
    params.dbeta = dbeta.vector;
    WorkspaceMemory const workspace(linear_bn::backward_workspace_bytes(params), u);
    linear_bn::launch_backward(params, workspace.data(), stream);
  }
  // weight's first: it takes the larger workspace, beside which input's gradient needn't stand.
  Tensor const dweight = weight_grad ? product(transposed(du), input, products) : nothing();
  Tensor const dinput = input_grad ? product(du, weight, products) : nothing();
  return {dinput, dweight, dbias.tensor, dscale.tensor, dgamma.tensor, dbeta.tensor};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cutlass_bn, CUDA, m) {
  m.impl("linear_batch_norm_backward", TORCH_BOX(&linear_batch_norm_backward));
}

}  // namespace cutlass_bn::ops
