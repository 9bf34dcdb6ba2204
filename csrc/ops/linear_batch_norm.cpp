// act(BatchNorm1d(scale * (input weight^T + bias))). Arguments are checked before anything is
// allocated, launched or changed.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>
#include <tuple>

#include "common/device_info.h"
#include "common/finalize.h"
#include "linear_bn/layer.h"
#include "ops/channel_view.h"
#include "ops/product.h"

namespace cutlass_bn::ops {
namespace {

using linear_bn::Path;
using torch::stable::accelerator::DeviceGuard;

struct Problem {
  int64_t m, n, k;
  DType dtype;
};

Problem check_operands(Tensor const& input, Tensor const& weight) {
  check_cuda(input, "input");
  CUTLASS_BN_CHECK(input.dim() == 2, "input: expected 2 dimensions, got shape ", shape_of(input));
  CUTLASS_BN_CHECK(weight.dim() == 2, "weight: expected 2 dimensions, got shape ",
                   shape_of(weight));
  Problem const problem{input.size(0), weight.size(0), input.size(1), dtype_of(input, "input")};
  check_on_device_of(weight, "weight", input);
  check_shape(weight, "weight", {problem.n, problem.k});
  DType const dtype = dtype_of(weight, "weight");
  CUTLASS_BN_CHECK(dtype == problem.dtype, "weight: expected ", name_of(problem.dtype),
                   " like input, got ", name_of(dtype));
  return problem;
}

DType check_out_dtype(ScalarType dtype, DType input_dtype) {
  CUTLASS_BN_CHECK(dtype == ScalarType::Float || dtype == scalar_type_of(input_dtype),
                   "dtype: expected that of input (", name_of(input_dtype),
                   ") or float32, got ScalarType code ", static_cast<int>(dtype));
  return dtype == ScalarType::Float ? DType::kFloat32 : input_dtype;
}

// Of the current device. out_row_stride, out_dtype: of u in training, of y in eval.
linear_bn::Request request_of(Tensor const& input, Tensor const& weight, DType dtype,
                              int64_t out_row_stride, DType out_dtype,
                              linear_bn::Fp32Products fp32_products) {
  DeviceInfo const& device = device_info();
  return {view_of(input), view_of(weight),           dtype,          out_row_stride, out_dtype,
          fp32_products,  device.compute_capability, device.sm_count};
}

// The bias where the product takes it, in the product's dtype.
std::optional<Tensor> bias_of_product(std::optional<Tensor> const& bias, Tensor const& input) {
  if (!bias || !linear_bn::takes_bias(dtype_of(input, "input"))) return std::nullopt;
  if (bias->scalar_type() == input.scalar_type()) return bias;
  Tensor copy = empty({bias->size(0)}, input.scalar_type(), input);
  torch::stable::copy_(copy, *bias);
  return copy;
}

// y [M, N] of `dtype`; u [M, N] of input's, in padded rows; stats. Empty: y and u are, stats are 0,
// and the batch counts.
std::tuple<Tensor, Tensor, Tensor> linear_batch_norm_training(
    Tensor const& input, Tensor const& weight, std::optional<Tensor> const& bias,
    std::optional<Tensor> const& scale, std::optional<Tensor> const& running_mean,
    std::optional<Tensor> const& running_var, std::optional<Tensor> const& num_batches_tracked,
    std::optional<Tensor> const& gamma, std::optional<Tensor> const& beta,
    std::optional<double> momentum, double eps, int64_t activation, ScalarType dtype,
    int64_t fp32_products) {
  Problem const p = check_operands(input, weight);
  CUTLASS_BN_CHECK(p.m != 1,
                   "input: expected more than 1 row for the statistics of a batch, got shape ",
                   shape_of(input));
  auto const products = fp32_products_of(fp32_products);
  linear_bn::TrainingParams params;
  FinalizeParams& finalize = params.finalize;
  set_running(finalize, running_mean, running_var, num_batches_tracked, momentum, p.n, input);
  finalize.scale = channel_vector(scale, "scale", p.n, input);
  finalize.eps = eps;
  params.bias = channel_vector(bias, "bias", p.n, input);
  params.gamma = channel_vector(gamma, "gamma", p.n, input);
  params.beta = channel_vector(beta, "beta", p.n, input);
  params.activation = activation_of(activation);
  params.y_dtype = check_out_dtype(dtype, p.dtype);

  DeviceGuard const guard(input.get_device_index());
  cudaStream_t const stream = current_stream(input);
  Tensor const u = empty_padded(p.m, p.n, input);
  Tensor const y = empty({p.m, p.n}, dtype, input);
  Tensor const stats = empty({3, p.n}, ScalarType::Float, input);
  if (p.m == 0 || p.n == 0) {
    fill_with_zeros(stats, stream);
    if (finalize.num_batches_tracked != nullptr)
      launch_count_batch(finalize.num_batches_tracked, stream);
    return {y, u, stats};
  }
  params.u = u.mutable_data_ptr();
  params.ldu = u.stride(0);
  params.y = y.mutable_data_ptr();
  params.ldy = p.n;
  finalize.stats = static_cast<float*>(stats.mutable_data_ptr());
  auto const product_bias = bias_of_product(bias, input);
  if (product_bias) params.bias = channel_vector(product_bias, "bias", p.n, input);
  auto const plan = linear_bn::plan_training(
      request_of(input, weight, p.dtype, params.ldu, p.dtype, products));
  WorkspaceMemory const workspace(plan.workspace_bytes, input);
  linear_bn::launch_training(
      plan, params, workspace.data(),
      [&] { multiply_by_torch(u, input, transposed(weight), product_bias); }, stream);
  return {y, u, stats};
}

Tensor linear_batch_norm_inference(Tensor const& input, Tensor const& weight,
                                   std::optional<Tensor> const& bias,
                                   std::optional<Tensor> const& scale, Tensor const& running_mean,
                                   Tensor const& running_var, std::optional<Tensor> const& gamma,
                                   std::optional<Tensor> const& beta, double eps,
                                   int64_t activation, ScalarType dtype, int64_t fp32_products) {
  Problem const p = check_operands(input, weight);
  DType const y_dtype = check_out_dtype(dtype, p.dtype);
  auto const products = fp32_products_of(fp32_products);
  linear_bn::InferenceParams params;
  params.layer.bias = channel_vector(bias, "bias", p.n, input);
  params.layer.scale = channel_vector(scale, "scale", p.n, input);
  params.layer.running_mean = channel_vector(running_mean, "running_mean", p.n, input);
  params.layer.running_var = channel_vector(running_var, "running_var", p.n, input);
  params.layer.gamma = channel_vector(gamma, "gamma", p.n, input);
  params.layer.beta = channel_vector(beta, "beta", p.n, input);
  params.layer.eps = eps;
  params.layer.activation = activation_of(activation);

  DeviceGuard const guard(input.get_device_index());
  Tensor const y = empty({p.m, p.n}, dtype, input);
  if (p.m == 0 || p.n == 0) return y;
  auto const plan = linear_bn::plan_inference(
      request_of(input, weight, p.dtype, p.n, y_dtype, products));
  bool const separate = plan.product.path == Path::kPortable && y_dtype != p.dtype;
  Tensor const u = separate ? empty({p.m, p.n}, input.scalar_type(), input) : y;
  params.y = y.mutable_data_ptr();
  params.ldy = p.n;
  params.u = u.const_data_ptr();
  params.ldu = p.n;
  WorkspaceMemory const workspace(plan.workspace_bytes, input);
  linear_bn::launch_inference(
      plan, params, workspace.data(),
      [&] { multiply_by_torch(u, input, transposed(weight), bias_of_product(bias, input)); },
      current_stream(input));
  return y;
}

// The path ("fused", or "portable"), the GEMM's tile, and why the path is portable.
std::tuple<std::string, std::string, std::string> linear_batch_norm_plan(Tensor const& input,
                                                                         Tensor const& weight,
                                                                         ScalarType dtype,
                                                                         int64_t fp32_products,
                                                                         bool inference) {
  Problem const p = check_operands(input, weight);
  DType const y_dtype = check_out_dtype(dtype, p.dtype);
  auto const products = fp32_products_of(fp32_products);
  DeviceGuard const guard(input.get_device_index());
  auto const plan = linear_bn::choose_plan(
      inference ? request_of(input, weight, p.dtype, p.n, y_dtype, products)
                : request_of(input, weight, p.dtype,
                             round_up(p.n, 16 / static_cast<int64_t>(size_of(p.dtype))), p.dtype,
                             products));
  if (plan.path == Path::kPortable) return {"portable", "", plan.reason};
  return {"fused", gemm::name_of(plan.tile), ""};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cutlass_bn, CUDA, m) {
  m.impl("linear_batch_norm_training", TORCH_BOX(&linear_batch_norm_training));
  m.impl("linear_batch_norm_inference", TORCH_BOX(&linear_batch_norm_inference));
  m.impl("linear_batch_norm_plan", TORCH_BOX(&linear_batch_norm_plan));
}

}  // namespace cutlass_bn::ops
