// BatchNorm over dim 1 of a dense input. Arguments are checked before anything is allocated, launched or changed.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "batch_norm/launch.h"
#include "common/finalize.h"
#include "ops/tensor_args.h"

namespace cutlass_bn::ops {
namespace {

using batch_norm::ChannelView;
using torch::stable::accelerator::DeviceGuard;

// Whether the dims in this order, outermost first, are packed without gaps. Strides of dims of size 1 mean nothing.
bool is_packed(Tensor const& t, std::vector<int64_t> const& order) {
  int64_t expected = 1;
  for (auto dim = order.rbegin(); dim != order.rend(); ++dim) {
    if (t.size(*dim) != 1 && t.stride(*dim) != expected) return false;
    expected *= t.size(*dim);
  }
  return true;
}

ChannelView channel_view(Tensor const& input) {
  check_cuda(input, "input");
  CUTLASS_BN_CHECK(input.dim() >= 2, "input: expected shape [N, C, ...], got ", shape_of(input));
  int64_t const channels = input.size(1);
  if (input.numel() == 0) return {0, channels, 1, channels};
  int64_t inner = 1;
  std::vector<int64_t> contiguous{0, 1}, channels_last{0};
  for (int64_t dim = 2; dim < input.dim(); ++dim) {
    inner *= input.size(dim);
    contiguous.push_back(dim);
    channels_last.push_back(dim);
  }
  channels_last.push_back(1);
  if (inner > 1 && is_packed(input, contiguous)) return {input.size(0), channels, inner, channels * inner};
  if (is_packed(input, channels_last)) return {input.size(0) * inner, channels, 1, channels};
  std::string strides;
  for (int64_t dim = 0; dim < input.dim(); ++dim) strides += (dim ? ", " : "") + std::to_string(input.stride(dim));
  fail("input: expected a dense tensor, contiguous or channels_last, got shape ", shape_of(input), " with strides [", strides, "]");
}

Tensor empty_like(Tensor const& input) {
  auto const sizes = input.sizes(), strides = input.strides();
  return empty_strided({sizes.begin(), sizes.end()}, {strides.begin(), strides.end()}, input.scalar_type(),
                       input.get_device_index());
}

Tensor batch_norm_stats(Tensor input, std::optional<Tensor> running_mean, std::optional<Tensor> running_var,
                        std::optional<Tensor> num_batches_tracked, std::optional<double> momentum, double eps) {
  ChannelView const view = channel_view(input);
  DType const dtype = dtype_of(input, "input");
  RunningBuffers const running = running_buffers(running_mean, running_var, num_batches_tracked, view.channels, input);
  CUTLASS_BN_CHECK(momentum || !running.mean || running.num_batches_tracked,
                   "momentum: expected a number, as num_batches_tracked is not given, got None");
  int64_t const rows = view.outer * view.inner;
  CUTLASS_BN_CHECK(rows != 1, "input: expected more than 1 value per channel, got shape ", shape_of(input));

  DeviceGuard const guard(input.get_device_index());
  cudaStream_t const stream = current_stream(input);
  Tensor stats = empty({3, view.channels}, ScalarType::Float, input);
  if (rows == 0 || view.channels == 0) {
    if (stats.numel() > 0) CUTLASS_BN_CUDA(cudaMemsetAsync(stats.mutable_data_ptr(), 0, stats.numel() * sizeof(float), stream));
    if (running.num_batches_tracked != nullptr) launch_count_batch(running.num_batches_tracked, stream);
    return stats;
  }
  int64_t const rows_per_tile = batch_norm::choose_rows_per_tile(view, dtype);
  int64_t const tiles = (rows + rows_per_tile - 1) / rows_per_tile;
  Tensor partials = empty({tiles, view.channels, 2}, ScalarType::Float, input);
  auto* const moments = static_cast<float2*>(partials.mutable_data_ptr());
  batch_norm::launch_stats({input.const_data_ptr(), dtype, view, rows_per_tile, moments}, stream);

  FinalizeParams finalize;
  finalize.partials = moments;
  finalize.tiles = tiles;
  finalize.channels = view.channels;
  finalize.rows = rows;
  finalize.rows_per_tile = rows_per_tile;
  finalize.running_mean = running.mean;
  finalize.running_var = running.var;
  finalize.num_batches_tracked = running.num_batches_tracked;
  finalize.momentum = momentum.value_or(0.0);
  finalize.cumulative = !momentum.has_value();
  finalize.eps = eps;
  finalize.stats = static_cast<float*>(stats.mutable_data_ptr());
  launch_finalize(finalize, stream);
  return stats;
}

// y in input's layout. `params` says where the statistics come from.
Tensor transform(Tensor const& input, ChannelView const& view, std::optional<Tensor> const& weight,
                 std::optional<Tensor> const& bias, batch_norm::TransformParams params) {
  params.view = view;
  params.dtype = dtype_of(input, "input");
  params.weight = channel_vector(weight, "weight", view.channels, input);
  params.bias = channel_vector(bias, "bias", view.channels, input);
  DeviceGuard const guard(input.get_device_index());
  Tensor y = empty_like(input);
  if (input.numel() == 0) return y;
  params.x = input.const_data_ptr();
  params.y = y.mutable_data_ptr();
  batch_norm::launch_transform(params, current_stream(input));
  return y;
}

Tensor batch_norm_transform(Tensor input, Tensor stats, std::optional<Tensor> weight, std::optional<Tensor> bias) {
  ChannelView const view = channel_view(input);
  check_on_device_of(stats, "stats", input);
  check_shape(stats, "stats", {3, view.channels});
  CUTLASS_BN_CHECK(stats.scalar_type() == ScalarType::Float && stats.is_contiguous(),
                   "stats: expected a contiguous float32 tensor, got ScalarType code ", static_cast<int>(stats.scalar_type()),
                   " with strides [", stats.stride(0), ", ", stats.stride(1), "]");
  batch_norm::TransformParams params;
  params.stats = static_cast<float const*>(stats.const_data_ptr());
  return transform(input, view, weight, bias, params);
}

Tensor batch_norm_inference(Tensor input, Tensor running_mean, Tensor running_var, std::optional<Tensor> weight,
                            std::optional<Tensor> bias, double eps) {
  ChannelView const view = channel_view(input);
  batch_norm::TransformParams params;
  params.running_mean = channel_vector(running_mean, "running_mean", view.channels, input);
  params.running_var = channel_vector(running_var, "running_var", view.channels, input);
  params.eps = static_cast<float>(eps);
  return transform(input, view, weight, bias, params);
}

STABLE_TORCH_LIBRARY_IMPL(cutlass_bn, CUDA, m) {
  m.impl("batch_norm_stats", TORCH_BOX(&batch_norm_stats));
  m.impl("batch_norm_transform", TORCH_BOX(&batch_norm_transform));
  m.impl("batch_norm_inference", TORCH_BOX(&batch_norm_inference));
}

}  // namespace
}  // namespace cutlass_bn::ops
