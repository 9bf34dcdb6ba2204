// BatchNorm over dim 1 of a dense input. Arguments are checked before anything is allocated, launched or changed.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>

#include "batch_norm/launch.h"
#include "common/finalize.h"
#include "ops/channel_view.h"
#include "ops/tensor_args.h"

namespace cutlass_bn::ops {
namespace {

using batch_norm::ChannelView;
using torch::stable::accelerator::DeviceGuard;

// y and stats. Empty: y is, stats are 0, and the batch counts.
std::tuple<Tensor, Tensor> batch_norm_training(Tensor input, std::optional<Tensor> running_mean, std::optional<Tensor> running_var,
                                               std::optional<Tensor> num_batches_tracked, std::optional<Tensor> weight,
                                               std::optional<Tensor> bias, std::optional<double> momentum, double eps) {
  ChannelView const view = channel_view(input);
  DType const dtype = dtype_of(input, "input");
  RunningBuffers const running = running_buffers(running_mean, running_var, num_batches_tracked, view.channels, input);
  ChannelVector const gamma = channel_vector(weight, "weight", view.channels, input);
  ChannelVector const beta = channel_vector(bias, "bias", view.channels, input);
  CUTLASS_BN_CHECK(momentum || !running.mean || running.num_batches_tracked,
                   "momentum: expected a number, as num_batches_tracked is not given, got None");
  int64_t const rows = view.outer * view.inner;
  CUTLASS_BN_CHECK(rows != 1, "input: expected more than 1 value per channel, got shape ", shape_of(input));

  DeviceGuard const guard(input.get_device_index());
  cudaStream_t const stream = current_stream(input);
  Tensor y = empty_with_layout_of(input);
  Tensor stats = empty({3, view.channels}, ScalarType::Float, input);
  if (rows == 0 || view.channels == 0) {
    if (stats.numel() > 0) CUTLASS_BN_CUDA(cudaMemsetAsync(stats.mutable_data_ptr(), 0, stats.numel() * sizeof(float), stream));
    if (running.num_batches_tracked != nullptr) launch_count_batch(running.num_batches_tracked, stream);
    return {y, stats};
  }
  void const* const x = input.const_data_ptr();
  FinalizeParams finalize;
  finalize.channels = view.channels;
  finalize.rows = rows;
  finalize.running_mean = running.mean;
  finalize.running_var = running.var;
  finalize.num_batches_tracked = running.num_batches_tracked;
  finalize.momentum = momentum.value_or(0.0);
  finalize.cumulative = !momentum.has_value();
  finalize.eps = eps;
  finalize.stats = static_cast<float*>(stats.mutable_data_ptr());

  if (auto const plan = plan_on_chip(view, dtype, false, {x, y.mutable_data_ptr()})) {
    Tensor const exchange = empty({plan->exchange_bytes()}, ScalarType::Byte, input);
    batch_norm::ResidentForwardParams const params{
        x, y.mutable_data_ptr(), dtype, gamma, beta, finalize, static_cast<float4*>(exchange.mutable_data_ptr())};
    if (batch_norm::launch_resident_forward(params, *plan, stream)) return {y, stats};
  }
  finalize.rows_per_tile = batch_norm::choose_rows_per_tile(view, dtype);
  finalize.tiles = (rows + finalize.rows_per_tile - 1) / finalize.rows_per_tile;
  Tensor const workspace = tile_moments_workspace(finalize, input);
  batch_norm::launch_stats({x, dtype, view, finalize.rows_per_tile, take_tile_moments(workspace, finalize)}, stream);
  launch_finalize(finalize, stream);

  batch_norm::TransformParams transform;
  transform.x = x;
  transform.y = y.mutable_data_ptr();
  transform.dtype = dtype;
  transform.view = view;
  transform.stats = finalize.stats;
  transform.weight = gamma;
  transform.bias = beta;
  batch_norm::launch_transform(transform, stream);
  return {y, stats};
}

Tensor batch_norm_inference(Tensor input, Tensor running_mean, Tensor running_var, std::optional<Tensor> weight,
                            std::optional<Tensor> bias, double eps) {
  ChannelView const view = channel_view(input);
  batch_norm::TransformParams params;
  params.running_mean = channel_vector(running_mean, "running_mean", view.channels, input);
  params.running_var = channel_vector(running_var, "running_var", view.channels, input);
  params.eps = static_cast<float>(eps);
  params.view = view;
  params.dtype = dtype_of(input, "input");
  params.weight = channel_vector(weight, "weight", view.channels, input);
  params.bias = channel_vector(bias, "bias", view.channels, input);
  DeviceGuard const guard(input.get_device_index());
  Tensor y = empty_with_layout_of(input);
  if (input.numel() == 0) return y;
  params.x = input.const_data_ptr();
  params.y = y.mutable_data_ptr();
  batch_norm::launch_transform(params, current_stream(input));
  return y;
}

std::string batch_norm_plan(Tensor input, bool backward) {
  ChannelView const view = channel_view(input);
  DType const dtype = dtype_of(input, "input");
  DeviceGuard const guard(input.get_device_index());
  if (input.numel() == 0) return "nothing to do";
  auto const plan = plan_on_chip(view, dtype, backward, {input.const_data_ptr()});
  if (!plan) return "two passes";
  return "on chip: blocks a channel " + std::to_string(plan->group) + ", channels at a time " + std::to_string(plan->groups) +
         ", chunks a warp " + std::to_string(plan->per_warp) + ", channels ahead " + std::to_string(plan->ahead);
}

STABLE_TORCH_LIBRARY_IMPL(cutlass_bn, CUDA, m) {
  m.impl("batch_norm_training", TORCH_BOX(&batch_norm_training));
  m.impl("batch_norm_inference", TORCH_BOX(&batch_norm_inference));
  m.impl("batch_norm_plan", TORCH_BOX(&batch_norm_plan));
}

}  // namespace
}  // namespace cutlass_bn::ops
