// Gradients of BatchNorm over dim 1. Arguments are checked before anything is allocated or launched.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "batch_norm/launch.h"
#include "ops/channel_view.h"
#include "ops/tensor_args.h"

namespace cutlass_bn::ops {
namespace {

using batch_norm::ChannelView;
using torch::stable::accelerator::DeviceGuard;

using Gradients = std::tuple<Tensor, Tensor, Tensor>;  // dx, dweight, dbias; empty where not asked for

// Whether dx is asked for, and the dtypes of the others.
struct Wanted {
  bool dx;
  std::optional<ScalarType> dweight, dbias;
};

// Of the batch (stats), or running ones.
struct Statistics {
  float const* stats = nullptr;
  ChannelVector running_mean, running_var;
  double eps = 0.0;

  bool of_batch() const { return stats != nullptr; }
  ChannelVector mean() const { return of_batch() ? ChannelVector{stats, DType::kFloat32} : running_mean; }
};

void check_arguments(Tensor const& grad, std::optional<Tensor> const& input, Wanted const& wanted) {
  check_activation(grad, "grad");
  DType const dtype = dtype_of(grad, "grad");
  if (wanted.dweight) dtype_of(*wanted.dweight, "weight_grad");
  if (wanted.dbias) dtype_of(*wanted.dbias, "bias_grad");
  if (!input) return;
  check_on_device_of(grad, "grad", *input);
  bool same = grad.dim() == input->dim();
  for (int64_t dim = 0; same && dim < grad.dim(); ++dim) same = grad.size(dim) == input->size(dim);
  CUTLASS_BN_CHECK(same, "grad: expected shape ", shape_of(*input), " like input, got ", shape_of(grad));
  DType const expected = dtype_of(*input, "input");
  CUTLASS_BN_CHECK(dtype == expected, "grad: expected ", name_of(expected), " like input, got ", name_of(dtype));
  channel_view(*input);
}

Tensor const& required(std::optional<Tensor> const& t, char const* name, char const* gradient) {
  CUTLASS_BN_CHECK(t.has_value(), name, ": expected a tensor, as the gradient of ", gradient, " is asked for, got None");
  return *t;
}

// grad itself where it is dense and, given input, of its layout; else a copy that is.
Tensor dense_gradient(Tensor const& grad, std::optional<Tensor> const& input) {
  if (auto const view = dense_view(grad)) {
    if (!input) return grad;
    ChannelView const expected = channel_view(*input);
    if (view->outer == expected.outer && view->inner == expected.inner) return grad;
  }
  std::vector<int64_t> contiguous(static_cast<std::size_t>(grad.dim()), 1);
  for (std::size_t dim = contiguous.size() - 1; dim-- > 0;) contiguous[dim] = contiguous[dim + 1] * grad.sizes()[dim + 1];
  Tensor dense =
      input ? empty_with_layout_of(*input) : empty_strided(grad.sizes(), contiguous, grad.scalar_type(), grad.get_device_index());
  torch::stable::copy_(dense, grad);
  return dense;
}

// Of no elements: zeros.
Gradients gradients_of_nothing(Tensor const& grad, Tensor const& dx, Tensor const& dweight, Tensor const& dbias) {
  for (Tensor const& t : {dweight, dbias}) {
    if (t.numel() == 0) continue;
    auto const bytes = static_cast<std::size_t>(t.numel()) * size_of(dtype_of(t, "gradient"));
    CUTLASS_BN_CUDA(cudaMemsetAsync(t.mutable_data_ptr(), 0, bytes, current_stream(grad)));
  }
  return {dx, dweight, dbias};
}

struct Reduction {
  Tensor workspace;               // where maps point to
  batch_norm::GradientMaps maps;  // what the transform needs for dx in training, null where that is not asked for
};

// But for partials, tiles and maps.
batch_norm::GradientFinalizeParams finalize_params(ChannelView const& view, Statistics const& statistics,
                                                   ChannelVector const& weight, MutableChannelVector const& dweight,
                                                   MutableChannelVector const& dbias) {
  batch_norm::GradientFinalizeParams finalize;
  finalize.channels = view.channels;
  finalize.rows = view.outer * view.inner;
  finalize.stats = statistics.stats;
  finalize.running_var = statistics.running_var;
  finalize.eps = statistics.eps;
  finalize.weight = weight;
  finalize.dweight = dweight;
  finalize.dbias = dbias;
  return finalize;
}

// Two kernels.
Reduction launch_reduction(Tensor const& grad, void const* x, ChannelView const& view, ChannelVector const& weight,
                           Statistics const& statistics, bool wants_maps, MutableChannelVector const& dweight,
                           MutableChannelVector const& dbias, cudaStream_t stream) {
  DType const dtype = dtype_of(grad, "grad");
  int64_t const rows = view.outer * view.inner;
  int64_t const rows_per_tile = batch_norm::choose_gradient_rows_per_tile(view, dtype, x != nullptr);
  int64_t const tiles = (rows + rows_per_tile - 1) / rows_per_tile;
  int64_t const map_floats = wants_maps ? 4 * view.channels : 0, partial_floats = 2 * tiles * view.channels;
  Tensor const workspace = empty({map_floats + partial_floats + view.channels}, ScalarType::Float, grad);
  auto* const floats = static_cast<float*>(workspace.mutable_data_ptr());

  batch_norm::GradientSumsParams sums;
  sums.dy = grad.const_data_ptr();
  sums.x = x;
  sums.dtype = dtype;
  sums.view = view;
  sums.mean = statistics.mean();
  sums.rows_per_tile = rows_per_tile;
  sums.partials = reinterpret_cast<float2*>(floats + map_floats);
  batch_norm::launch_gradient_sums(sums, stream);

  batch_norm::GradientFinalizeParams finalize = finalize_params(view, statistics, weight, dweight, dbias);
  finalize.partials = sums.partials;
  finalize.tiles = tiles;
  if (x == nullptr) finalize.stats = nullptr;
  if (wants_maps) finalize.maps = {reinterpret_cast<float4*>(floats), floats + map_floats + partial_floats};
  batch_norm::launch_gradient_finalize(finalize, stream);
  return {workspace, finalize.maps};
}

MutableChannelVector output(Tensor const& t, std::optional<ScalarType> dtype) {
  return dtype ? MutableChannelVector{t.mutable_data_ptr(), dtype_of(*dtype, "gradient")} : MutableChannelVector{};
}

Gradients gradients(Tensor const& any_grad, std::optional<Tensor> const& input, ChannelVector const& weight,
                    Statistics const& statistics, Wanted const& wanted) {
  int64_t const channels = any_grad.size(1);
  DeviceGuard const guard(any_grad.get_device_index());
  cudaStream_t const stream = current_stream(any_grad);
  Tensor const grad = dense_gradient(any_grad, input);
  Tensor const dx = wanted.dx ? empty_with_layout_of(input ? *input : grad) : empty({0}, grad.scalar_type(), grad);
  Tensor const dweight = empty({wanted.dweight ? channels : 0}, wanted.dweight.value_or(ScalarType::Float), grad);
  Tensor const dbias = empty({wanted.dbias ? channels : 0}, wanted.dbias.value_or(ScalarType::Float), grad);
  if (grad.numel() == 0) return gradients_of_nothing(grad, dx, dweight, dbias);

  ChannelView const view = *dense_view(grad);
  bool const training_dx = wanted.dx && statistics.of_batch();
  bool const reads_x = training_dx || wanted.dweight;
  void const* const x = reads_x ? input->const_data_ptr() : nullptr;
  if (training_dx) {
    DType const dtype = dtype_of(grad, "grad");
    if (auto const plan = plan_on_chip(view, dtype, true, {grad.const_data_ptr(), x, dx.mutable_data_ptr()})) {
      Tensor const exchange = empty({plan->exchange_bytes()}, ScalarType::Byte, grad);
      batch_norm::ResidentGradientParams params;
      params.dy = grad.const_data_ptr();
      params.x = x;
      params.dx = dx.mutable_data_ptr();
      params.dtype = dtype;
      params.finalize = finalize_params(view, statistics, weight, output(dweight, wanted.dweight), output(dbias, wanted.dbias));
      params.exchange = static_cast<float4*>(exchange.mutable_data_ptr());
      if (batch_norm::launch_resident_gradient(params, *plan, stream)) return {dx, dweight, dbias};
    }
  }
  std::optional<Reduction> reduction;
  if (training_dx || wanted.dweight || wanted.dbias) {
    reduction = launch_reduction(grad, x, view, weight, statistics, training_dx, output(dweight, wanted.dweight),
                                 output(dbias, wanted.dbias), stream);
  }
  if (training_dx) {
    batch_norm::launch_gradient_transform(
        {grad.const_data_ptr(), x, dx.mutable_data_ptr(), dtype_of(grad, "grad"), view, reduction->maps}, stream);
  } else if (wanted.dx) {
    batch_norm::TransformParams transform;
    transform.x = grad.const_data_ptr();
    transform.y = dx.mutable_data_ptr();
    transform.dtype = dtype_of(grad, "grad");
    transform.view = view;
    transform.running_var = statistics.running_var;
    transform.eps = static_cast<float>(statistics.eps);
    transform.weight = weight;
    batch_norm::launch_transform(transform, stream);
  }
  return {dx, dweight, dbias};
}

Gradients batch_norm_backward(Tensor const& grad, std::optional<Tensor> const& input, std::optional<Tensor> const& stats,
                              std::optional<Tensor> const& weight, bool input_grad, std::optional<ScalarType> weight_grad,
                              std::optional<ScalarType> bias_grad) {
  Wanted const wanted{input_grad, weight_grad, bias_grad};
  check_arguments(grad, input, wanted);
  Statistics statistics;
  if (input_grad || weight_grad) {
    char const* const gradient = input_grad ? "input" : "weight";
    required(input, "input", gradient);
    statistics.stats = stats_data(required(stats, "stats", gradient), grad.size(1), grad);
  }
  return gradients(grad, input, channel_vector(weight, "weight", grad.size(1), grad), statistics, wanted);
}

Gradients batch_norm_inference_backward(Tensor const& grad, std::optional<Tensor> const& input,
                                        std::optional<Tensor> const& running_mean, std::optional<Tensor> const& running_var,
                                        std::optional<Tensor> const& weight, double eps, bool input_grad,
                                        std::optional<ScalarType> weight_grad, std::optional<ScalarType> bias_grad) {
  Wanted const wanted{input_grad, weight_grad, bias_grad};
  check_arguments(grad, input, wanted);
  int64_t const channels = grad.size(1);
  Statistics statistics;
  statistics.eps = eps;
  if (weight_grad) {
    required(input, "input", "weight");
    statistics.running_mean = channel_vector(required(running_mean, "running_mean", "weight"), "running_mean", channels, grad);
  }
  if (input_grad || weight_grad) {
    Tensor const& variance = required(running_var, "running_var", input_grad ? "input" : "weight");
    statistics.running_var = channel_vector(variance, "running_var", channels, grad);
  }
  return gradients(grad, input, channel_vector(weight, "weight", channels, grad), statistics, wanted);
}

STABLE_TORCH_LIBRARY_IMPL(cutlass_bn, CUDA, m) {
  m.impl("batch_norm_backward", TORCH_BOX(&batch_norm_backward));
  m.impl("batch_norm_inference_backward", TORCH_BOX(&batch_norm_inference_backward));
}

}  // namespace
}  // namespace cutlass_bn::ops
