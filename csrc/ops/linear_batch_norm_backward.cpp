// Gradients of the training forward's second half, from y back to u = input weight^T. Arguments are checked before anything is
// allocated or launched.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "batch_norm/launch.h"
#include "ops/channel_view.h"
#include "ops/matrix_args.h"

namespace cutlass_bn::ops {
namespace {

using batch_norm::ChannelView;
using torch::stable::accelerator::DeviceGuard;

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // du, dscale, dgamma, dbeta; empty where not asked for

// A vector of the given dtype; none: not asked for.
struct VectorGradient {
  Tensor tensor;
  MutableChannelVector vector;

  VectorGradient(std::optional<ScalarType> dtype, int64_t n, Tensor const& like)
      : tensor(empty({dtype ? n : 0}, dtype.value_or(ScalarType::Float), like)) {
    if (dtype) vector = {tensor.mutable_data_ptr(), dtype_of(*dtype, "gradient")};
  }

  void fill_with_zeros(cudaStream_t stream) const {
    auto const bytes = static_cast<std::size_t>(tensor.numel()) * size_of(vector.dtype);
    if (bytes != 0) CUTLASS_BN_CUDA(cudaMemsetAsync(vector.data, 0, bytes, stream));
  }
};

Tensor with_dense_rows(Tensor const& matrix) {
  if (has_dense_rows(matrix)) return matrix;
  Tensor copy = empty({matrix.size(0), matrix.size(1)}, matrix.scalar_type(), matrix);
  torch::stable::copy_(copy, matrix);
  return copy;
}

Gradients linear_batch_norm_backward(Tensor const& any_grad, Tensor const& u, Tensor const& stats,
                                     std::optional<Tensor> const& scale, std::optional<Tensor> const& gamma,
                                     std::optional<Tensor> const& beta, double eps, int64_t activation, bool u_grad,
                                     std::optional<ScalarType> scale_grad, std::optional<ScalarType> gamma_grad,
                                     std::optional<ScalarType> beta_grad) {
  check_cuda(u, "u");
  CUTLASS_BN_CHECK(u.dim() == 2, "u: expected 2 dimensions, got shape ", shape_of(u));
  check_dense_rows(u, "u");
  int64_t const m = u.size(0), n = u.size(1);
  DType const dtype = dtype_of(u, "u"), grad_dtype = dtype_of(any_grad, "grad");
  check_on_device_of(any_grad, "grad", u);
  check_shape(any_grad, "grad", {m, n});
  CUTLASS_BN_CHECK(grad_dtype == dtype || grad_dtype == DType::kFloat32, "grad: expected ", name_of(dtype),
                   " like u or float32, got ", name_of(grad_dtype));
  if (scale_grad) dtype_of(*scale_grad, "scale_grad");
  if (gamma_grad) dtype_of(*gamma_grad, "gamma_grad");
  if (beta_grad) dtype_of(*beta_grad, "beta_grad");
  batch_norm::ActivatedSumsParams sums;
  sums.matrix.activation = activation_of(activation);
  sums.stats = stats_data(stats, n, u);
  sums.scale = channel_vector(scale, "scale", n, u);
  sums.weight = channel_vector(gamma, "gamma", n, u);
  sums.bias = channel_vector(beta, "beta", n, u);

  DeviceGuard const guard(u.get_device_index());
  cudaStream_t const stream = current_stream(u);
  Tensor const du = u_grad ? empty_padded(m, n, u.scalar_type(), u) : empty({0}, u.scalar_type(), u);
  VectorGradient const dscale(scale_grad, n, u), dgamma(gamma_grad, n, u), dbeta(beta_grad, n, u);
  Gradients const gradients{du, dscale.tensor, dgamma.tensor, dbeta.tensor};
  if (m == 0 || n == 0) {
    for (VectorGradient const* vector : {&dscale, &dgamma, &dbeta}) vector->fill_with_zeros(stream);
    return gradients;
  }
  if (!u_grad && !scale_grad && !gamma_grad && !beta_grad) return gradients;

  Tensor const grad = with_dense_rows(any_grad);
  sums.matrix.dy = grad.const_data_ptr();
  sums.matrix.x = u.const_data_ptr();
  sums.matrix.dy_dtype = grad_dtype;
  sums.matrix.x_dtype = dtype;
  sums.matrix.rows = m;
  sums.matrix.channels = n;
  sums.matrix.dy_row_stride = grad.stride(0);
  sums.matrix.x_row_stride = u.stride(0);
  // beta's gradient alone depends on u through the activation alone.
  bool const reads_u = u_grad || scale_grad || gamma_grad || sums.matrix.activation != Activation::kNone;
  ChannelView const view{m, n, 1, reads_u ? u.stride(0) : grad.stride(0)};
  int64_t const rows_per_tile = batch_norm::choose_gradient_rows_per_tile(view, reads_u ? dtype : grad_dtype, reads_u);
  int64_t const tiles = (m + rows_per_tile - 1) / rows_per_tile;
  int64_t const map_floats = u_grad ? 4 * n : 0, partial_floats = 2 * tiles * n;
  Tensor const workspace = empty({map_floats + partial_floats + 2 * n}, ScalarType::Float, u);
  auto* const floats = static_cast<float*>(workspace.mutable_data_ptr());
  auto* const partials = reinterpret_cast<float2*>(floats + map_floats);
  if (reads_u) {
    sums.rows_per_tile = rows_per_tile;
    sums.partials = partials;
    batch_norm::launch_activated_sums(sums, stream);
  } else {
    batch_norm::launch_gradient_sums({grad.const_data_ptr(), nullptr, grad_dtype, view, {}, rows_per_tile, partials}, stream);
  }

  batch_norm::GradientFinalizeParams finalize;
  finalize.partials = partials;
  finalize.tiles = tiles;
  finalize.channels = n;
  finalize.rows = m;
  finalize.stats = reads_u ? sums.stats : nullptr;
  finalize.eps = eps;
  finalize.scale = sums.scale;
  finalize.weight = sums.weight;
  finalize.bias = sums.bias;
  finalize.dscale = dscale.vector;
  finalize.dweight = dgamma.vector;
  finalize.dbias = dbeta.vector;
  if (u_grad) {
    float* const ends = floats + map_floats + partial_floats;
    finalize.maps = {reinterpret_cast<float4*>(floats), ends, ends + n};
  }
  batch_norm::launch_gradient_finalize(finalize, stream);
  if (u_grad) {
    batch_norm::launch_activated_transform({sums.matrix, du.mutable_data_ptr(), padded_row(n, dtype), finalize.maps}, stream);
  }
  return gradients;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cutlass_bn, CUDA, m) { m.impl("linear_batch_norm_backward", TORCH_BOX(&linear_batch_norm_backward)); }

}  // namespace cutlass_bn::ops
