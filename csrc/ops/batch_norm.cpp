// BatchNorm over dim 1 of a dense input. Arguments are checked before anything is allocated,
// launched or changed.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "batch_norm/layer.h"
#include "ops/channel_view.h"
#include "ops/tensor_args.h"

namespace cutlass_bn::ops {
namespace {

using batch_norm::ChannelView;
using torch::stable::accelerator::DeviceGuard;

// y and stats. Empty: y is, stats are 0, and the batch counts.
std::tuple<Tensor, Tensor> batch_norm_training(Tensor input, std::optional<Tensor> running_mean,
                                               std::optional<Tensor> running_var,
                                               std::optional<Tensor> num_batches_tracked,
                                               std::optional<Tensor> weight,
                                               std::optional<Tensor> bias,
                                               std::optional<double> momentum, double eps) {
  ChannelView const view = channel_view(input);
  DType const dtype = dtype_of(input, "input");
  batch_norm::ForwardParams params;
  FinalizeParams& finalize = params.finalize;
  set_running(finalize, running_mean, running_var, num_batches_tracked, momentum, view.channels,
              input);
  finalize.eps = eps;
  params.gamma = channel_vector(weight, "weight", view.channels, input);
  params.beta = channel_vector(bias, "bias", view.channels, input);
  CUTLASS_BN_CHECK(view.rows() != 1, "input: expected more than 1 value per channel, got shape ",
                   shape_of(input));

  DeviceGuard const guard(input.get_device_index());
  cudaStream_t const stream = current_stream(input);
  Tensor y = empty_with_layout_of(input);
  Tensor stats = empty({3, view.channels}, ScalarType::Float, input);
  if (input.numel() == 0) {
    fill_with_zeros(stats, stream);
    if (finalize.num_batches_tracked != nullptr)
      launch_count_batch(finalize.num_batches_tracked, stream);
    return {y, stats};
  }
  params.x = input.const_data_ptr();
  params.y = y.mutable_data_ptr();
  finalize.stats = static_cast<float*>(stats.mutable_data_ptr());
  auto const plan = batch_norm::plan_forward(view, dtype,
                                             is_aligned(params.x) && is_aligned(params.y));
  WorkspaceMemory const workspace(plan.workspace_bytes, input);
  batch_norm::launch_forward(plan, params, workspace.data(), stream);
  return {y, stats};
}

Tensor batch_norm_inference(Tensor input, Tensor running_mean, Tensor running_var,
                            std::optional<Tensor> weight, std::optional<Tensor> bias, double eps) {
  batch_norm::TransformParams params;
  params.view = channel_view(input);
  params.dtype = dtype_of(input, "input");
  int64_t const channels = params.view.channels;
  params.layer.running_mean = channel_vector(running_mean, "running_mean", channels, input);
  params.layer.running_var = channel_vector(running_var, "running_var", channels, input);
  params.layer.gamma = channel_vector(weight, "weight", channels, input);
  params.layer.beta = channel_vector(bias, "bias", channels, input);
  params.layer.eps = eps;
  DeviceGuard const guard(input.get_device_index());
  Tensor y = empty_with_layout_of(input);
  if (input.numel() == 0) return y;
  params.x = input.const_data_ptr();
  params.y = y.mutable_data_ptr();
  batch_norm::launch_inference(params, current_stream(input));
  return y;
}

// Blocks that share a channel, channels at a time, chunks a warp, channels ahead; zeros where a
// pass is of two kernels.
std::tuple<int64_t, int64_t, int64_t, int64_t> batch_norm_plan(Tensor input, bool backward) {
  ChannelView const view = channel_view(input);
  DType const dtype = dtype_of(input, "input");
  DeviceGuard const guard(input.get_device_index());
  if (input.numel() == 0) return {0, 0, 0, 0};
  bool const aligned = is_aligned(input.const_data_ptr());
  auto const plan = backward
                        ? batch_norm::plan_backward(view, dtype, {true, true, true}, true, aligned)
                        : batch_norm::plan_forward(view, dtype, aligned);
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
