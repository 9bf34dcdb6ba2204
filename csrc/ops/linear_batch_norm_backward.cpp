// Gradients of the training forward's second half, from y back to u = input weight^T. Arguments are
// checked before anything is allocated or launched.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "linear_bn/layer.h"
#include "ops/channel_view.h"
#include "ops/matrix_args.h"

namespace cutlass_bn::ops {
namespace {

using torch::stable::accelerator::DeviceGuard;

using Gradients = std::tuple<Tensor, Tensor, Tensor,
                             Tensor>;  // du, dscale, dgamma, dbeta; empty where not asked for

Tensor with_dense_rows(Tensor const& matrix) {
  if (has_dense_rows(matrix)) return matrix;
  Tensor copy = empty({matrix.size(0), matrix.size(1)}, matrix.scalar_type(), matrix);
  torch::stable::copy_(copy, matrix);
  return copy;
}

Gradients linear_batch_norm_backward(Tensor const& any_grad, Tensor const& u, Tensor const& stats,
                                     std::optional<Tensor> const& scale,
                                     std::optional<Tensor> const& gamma,
                                     std::optional<Tensor> const& beta, double eps,
                                     int64_t activation, bool u_grad,
                                     std::optional<ScalarType> scale_grad,
                                     std::optional<ScalarType> gamma_grad,
                                     std::optional<ScalarType> beta_grad) {
  check_cuda(u, "u");
  CUTLASS_BN_CHECK(u.dim() == 2, "u: expected 2 dimensions, got shape ", shape_of(u));
  check_dense_rows(u, "u");
  int64_t const m = u.size(0), n = u.size(1);
  DType const dtype = dtype_of(u, "u"), grad_dtype = dtype_of(any_grad, "grad");
  check_on_device_of(any_grad, "grad", u);
  check_shape(any_grad, "grad", {m, n});
  CUTLASS_BN_CHECK(grad_dtype == dtype || grad_dtype == DType::kFloat32, "grad: expected ",
                   name_of(dtype), " like u or float32, got ", name_of(grad_dtype));
  if (scale_grad) dtype_of(*scale_grad, "scale_grad");
  if (gamma_grad) dtype_of(*gamma_grad, "gamma_grad");
  if (beta_grad) dtype_of(*beta_grad, "beta_grad");
  linear_bn::BackwardParams params;
  params.stats = stats_data(stats, n, u);
  params.layer.scale = channel_vector(scale, "scale", n, u);
  params.layer.gamma = channel_vector(gamma, "gamma", n, u);
  params.layer.beta = channel_vector(beta, "beta", n, u);
  params.layer.eps = eps;
  params.layer.activation = activation_of(activation);

  DeviceGuard const guard(u.get_device_index());
  cudaStream_t const stream = current_stream(u);
  Tensor const du = u_grad ? empty_padded(m, n, u.scalar_type(), u)
                           : empty({0}, u.scalar_type(), u);
  VectorGradient const dscale(scale_grad, n, u), dgamma(gamma_grad, n, u), dbeta(beta_grad, n, u);
  Gradients const gradients{du, dscale.tensor, dgamma.tensor, dbeta.tensor};
  if (m == 0 || n == 0) {
    for (VectorGradient const* vector : {&dscale, &dgamma, &dbeta})
      fill_with_zeros(vector->tensor, stream);
    return gradients;
  }
  if (!u_grad && !scale_grad && !gamma_grad && !beta_grad) return gradients;

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
  params.du_row_stride = padded_row(n, dtype);
  params.dscale = dscale.vector;
  params.dgamma = dgamma.vector;
  params.dbeta = dbeta.vector;
  WorkspaceMemory const workspace(linear_bn::backward_workspace_bytes(params), u);
  linear_bn::launch_backward(params, workspace.data(), stream);
  return gradients;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cutlass_bn, CUDA, m) {
  m.impl("linear_batch_norm_backward", TORCH_BOX(&linear_batch_norm_backward));
}

}  // namespace cutlass_bn::ops
