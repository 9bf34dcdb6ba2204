// activation(BatchNorm(input) + residual), over dim 1. Arguments are checked before anything is
// allocated, launched or changed.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "batch_norm/layer.h"
#include "ops/channel_view.h"
#include "ops/tensor_args.h"

namespace cutlass_bn::ops {
namespace {

using torch::stable::accelerator::DeviceGuard;

// y and stats. Empty: y is, stats are 0, and the batch counts.
std::tuple<Tensor, Tensor> batch_norm_training(
    Tensor const& any_input, std::optional<Tensor> const& any_residual,
    std::optional<Tensor> const& running_mean, std::optional<Tensor> const& running_var,
    std::optional<Tensor> const& num_batches_tracked, std::optional<Tensor> const& weight,
    std::optional<Tensor> const& bias, std::optional<double> momentum, double eps,
    int64_t activation) {
  check_input(any_input, "input");
  DType const dtype = dtype_of(any_input, "input");
  if (any_residual) check_like_input(*any_residual, "residual", any_input);
  int64_t const channels = any_input.size(1), values = any_input.numel();
  batch_norm::ForwardParams params;
  params.activation = activation_of(activation);
  FinalizeParams& finalize = params.finalize;
  set_running(finalize, running_mean, running_var, num_batches_tracked, momentum, channels,
              any_input);
  finalize.eps = eps;
  VectorArgument gamma(weight, "weight", channels, any_input),
      beta(bias, "bias", channels, any_input);
  CUTLASS_BN_CHECK(values != channels || values == 0,
                   "input: expected more than 1 value per channel, got shape ",
                   shape_of(any_input));

  DeviceGuard const guard(any_input.get_device_index());
  cudaStream_t const stream = current_stream(any_input);
  DenseTensor const input(any_input);
  Tensor y = empty_with_layout_of(input.tensor);
  Tensor stats = empty({3, channels}, ScalarType::Float, any_input);
  if (values == 0) {
    fill_with_zeros(stats, stream);
    if (finalize.num_batches_tracked != nullptr)
      launch_count_batch(finalize.num_batches_tracked, stream);
    return {y, stats};
  }
  std::optional<Tensor> residual;
  if (any_residual) residual = input.lay_out(*any_residual);
  params.x = input.tensor.const_data_ptr();
  params.residual = residual ? residual->const_data_ptr() : nullptr;
  params.y = y.mutable_data_ptr();
  params.gamma = gamma.contiguous();
  params.beta = beta.contiguous();
  finalize.stats = static_cast<float*>(stats.mutable_data_ptr());
  bool const aligned = is_aligned(params.x) && is_aligned(params.y);
  auto const plan = batch_norm::plan_forward(input.view, dtype, aligned, residual.has_value());
  WorkspaceMemory const workspace(plan.workspace_bytes, any_input);
  batch_norm::launch_forward(plan, params, workspace.data(), stream);
  return {y, stats};
}

Tensor batch_norm_inference(Tensor const& any_input, std::optional<Tensor> const& any_residual,
                            Tensor const& running_mean, Tensor const& running_var,
                            std::optional<Tensor> const& weight, std::optional<Tensor> const& bias,
                            double eps, int64_t activation) {
  check_input(any_input, "input");
  batch_norm::TransformParams params;
  params.dtype = dtype_of(any_input, "input");
  if (any_residual) check_like_input(*any_residual, "residual", any_input);
  int64_t const channels = any_input.size(1);
  params.layer.running_mean = channel_vector(running_mean, "running_mean", channels, any_input);
  params.layer.running_var = channel_vector(running_var, "running_var", channels, any_input);
  VectorArgument gamma(weight, "weight", channels, any_input),
      beta(bias, "bias", channels, any_input);
  params.layer.eps = eps;
  params.layer.activation = activation_of(activation);

  DeviceGuard const guard(any_input.get_device_index());
  DenseTensor const input(any_input);
  Tensor y = empty_with_layout_of(input.tensor);
  if (any_input.numel() == 0) return y;
  std::optional<Tensor> residual;
  if (any_residual) residual = input.lay_out(*any_residual);
  params.view = input.view;
  params.x = input.tensor.const_data_ptr();
  params.residual = residual ? residual->const_data_ptr() : nullptr;
  params.y = y.mutable_data_ptr();
  params.layer.gamma = gamma.contiguous();
  params.layer.beta = beta.contiguous();
  batch_norm::launch_inference(params, current_stream(any_input));
  return y;
}

// Blocks that share a channel, channels at a time, chunks a warp, channels ahead; zeros where a
// pass is of two kernels.
std::tuple<int64_t, int64_t, int64_t, int64_t> batch_norm_plan(Tensor const& input, bool backward) {
  check_input(input, "input");
  DType const dtype = dtype_of(input, "input");
  DeviceGuard const guard(input.get_device_index());
  auto const view = dense_view(input);
  if (!view || input.numel() == 0) return {0, 0, 0, 0};
  bool const aligned = is_aligned(input.const_data_ptr());
  batch_norm::BackwardRequest request{*view, dtype};
  request.dx = request.dgamma = request.dbeta = true;
  request.aligned = aligned;
  auto const plan = backward ? batch_norm::plan_backward(request)
                             : batch_norm::plan_forward(*view, dtype, aligned);
  if (!plan.on_chip) return {0, 0, 0, 0};
  return {plan.on_chip->group, plan.on_chip->groups, plan.on_chip->per_warp, plan.on_chip->ahead};
}

STABLE_TORCH_LIBRARY_IMPL(cutlass_bn, CUDA, m) {
  m.impl("batch_norm_training", TORCH_BOX(&batch_norm_training));
  m.impl("batch_norm_inference", TORCH_BOX(&batch_norm_inference));
  m.impl("batch_norm_plan", TORCH_BOX(&batch_norm_plan));
}

}  // namespace
}  // namespace cutlass_bn::ops
