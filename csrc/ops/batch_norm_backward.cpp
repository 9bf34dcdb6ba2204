// Gradients of activation(BatchNorm(input) + residual), over dim 1. Arguments are checked before
// anything is allocated or launched.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "batch_norm/layer.h"
#include "ops/channel_view.h"
#include "ops/tensor_args.h"

namespace cutlass_bn::ops {
namespace {

using batch_norm::BackwardRequest;
using batch_norm::Saved;
using torch::stable::accelerator::DeviceGuard;

// dx, dresidual, dweight, dbias; empty where not asked for.
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// Tensors of the input's size, and the dtypes of the gradients that are vectors.
struct Arguments {
  Tensor const& grad;
  std::optional<Tensor> const& input;
  std::optional<Tensor> const& after;
  std::optional<ScalarType> weight_grad, bias_grad;
};

// What the gradient that is asked for first is of.
char const* asked_for(BackwardRequest const& r) {
  return r.dx ? "input" : r.dgamma ? "weight" : r.dresidual ? "residual" : "bias";
}

Tensor const& required(std::optional<Tensor> const& t, char const* name, char const* gradient) {
  CUTLASS_BN_CHECK(t.has_value(), name, ": expected a tensor, as the gradient of ", gradient,
                   " is asked for, got None");
  return *t;
}

BackwardRequest checked_request(Arguments const& a, int64_t activation, bool of_batch,
                                bool input_grad, bool residual_grad) {
  check_input(a.grad, "grad");
  BackwardRequest r;
  r.dtype = dtype_of(a.grad, "grad");
  if (a.weight_grad) dtype_of(*a.weight_grad, "weight_grad");
  if (a.bias_grad) dtype_of(*a.bias_grad, "bias_grad");
  if (a.input) {
    check_input(*a.input, "input");
    check_like_input(a.grad, "grad", *a.input);
  }
  r.activation = activation_of(activation);
  r.of_batch = of_batch;
  r.dx = input_grad;
  r.dresidual = residual_grad;
  r.dgamma = a.weight_grad.has_value();
  r.dbeta = a.bias_grad.has_value();
  CUTLASS_BN_CHECK(!residual_grad || r.activation != Activation::kNone,
                   "residual_grad: expected False without an activation, as that gradient is grad, "
                   "got True");
  if (residual_grad) required(a.after, "after", "residual");
  r.with_residual = a.after.has_value();
  if (r.reads_saved()) check_like_input(*a.after, "after", a.grad, "grad");
  if (r.reads_x()) required(a.input, "input", r.dx || r.dgamma ? asked_for(r) : "activation");
  return r;
}

// params: without tensors of the input's size and the gradients.
Gradients gradients(Arguments const& a, BackwardRequest request, batch_norm::BackwardParams params,
                    VectorArgument& gamma, VectorArgument& beta) {
  DeviceGuard const guard(a.grad.get_device_index());
  cudaStream_t const stream = current_stream(a.grad);
  // All tensors are laid out like the first of these that there is.
  DenseTensor const first(a.input ? *a.input : request.reads_saved() ? *a.after : a.grad);
  auto const like_first = [&](bool asked) {
    return asked ? empty_with_layout_of(first.tensor)
                 : empty({0}, first.tensor.scalar_type(), first.tensor);
  };
  Tensor const dx = like_first(request.dx), dresidual = like_first(request.dresidual);
  int64_t const channels = a.grad.size(1);
  VectorGradient const dweight(a.weight_grad, channels, a.grad),
      dbias(a.bias_grad, channels, a.grad);
  if (a.grad.numel() == 0) {
    fill_with_zeros(dweight.tensor, stream);
    fill_with_zeros(dbias.tensor, stream);
  } else if (request.any()) {
    Tensor const grad = first.lay_out(a.grad);
    std::optional<Tensor> saved;
    if (request.reads_saved()) saved = first.lay_out(*a.after);
    params.dy = grad.const_data_ptr();
    params.x = request.reads_x() ? first.tensor.const_data_ptr() : nullptr;
    params.saved = saved ? saved->const_data_ptr() : nullptr;
    params.dx = request.dx ? dx.mutable_data_ptr() : nullptr;
    params.dresidual = request.dresidual ? dresidual.mutable_data_ptr() : nullptr;
    params.layer.gamma = gamma.contiguous();
    if (request.makes_v()) params.layer.beta = beta.contiguous();
    params.dgamma = dweight.vector;
    params.dbeta = dbias.vector;
    request.view = first.view;
    request.aligned = is_aligned(params.dy) && is_aligned(params.x) && is_aligned(params.saved) &&
                      is_aligned(params.dx) && is_aligned(params.dresidual);
    auto const plan = batch_norm::plan_backward(request);
    WorkspaceMemory const workspace(plan.workspace_bytes, grad);
    batch_norm::launch_backward(plan, request, params, workspace.data(), stream);
  }
  return {dx, dresidual, dweight.tensor, dbias.tensor};
}

Gradients batch_norm_backward(Tensor const& grad, std::optional<Tensor> const& input,
                              std::optional<Tensor> const& stats,
                              std::optional<Tensor> const& weight,
                              std::optional<Tensor> const& bias, std::optional<Tensor> const& after,
                              int64_t activation, bool input_grad, bool residual_grad,
                              std::optional<ScalarType> weight_grad,
                              std::optional<ScalarType> bias_grad) {
  Arguments const arguments{grad, input, after, weight_grad, bias_grad};
  BackwardRequest const request = checked_request(arguments, activation, true, input_grad,
                                                  residual_grad);
  int64_t const channels = grad.size(1);
  batch_norm::BackwardParams params;
  if (request.reads_x())
    params.stats = stats_data(required(stats, "stats", asked_for(request)), channels, grad);
  VectorArgument gamma(weight, "weight", channels, grad), beta(bias, "bias", channels, grad);
  return gradients(arguments, request, params, gamma, beta);
}

Gradients batch_norm_inference_backward(Tensor const& grad, std::optional<Tensor> const& input,
                                        std::optional<Tensor> const& running_mean,
                                        std::optional<Tensor> const& running_var,
                                        std::optional<Tensor> const& weight,
                                        std::optional<Tensor> const& bias,
                                        std::optional<Tensor> const& after, double eps,
                                        int64_t activation, bool input_grad, bool residual_grad,
                                        std::optional<ScalarType> weight_grad,
                                        std::optional<ScalarType> bias_grad) {
  Arguments const arguments{grad, input, after, weight_grad, bias_grad};
  BackwardRequest const request = checked_request(arguments, activation, false, input_grad,
                                                  residual_grad);
  int64_t const channels = grad.size(1);
  batch_norm::BackwardParams params;
  params.layer.eps = eps;
  if (request.reads_x()) {
    Tensor const& mean = required(running_mean, "running_mean",
                                  request.dgamma ? "weight" : asked_for(request));
    params.layer.running_mean = channel_vector(mean, "running_mean", channels, grad);
  }
  if (request.reads_x() || request.dx) {
    Tensor const& variance = required(running_var, "running_var", asked_for(request));
    params.layer.running_var = channel_vector(variance, "running_var", channels, grad);
  }
  VectorArgument gamma(weight, "weight", channels, grad), beta(bias, "bias", channels, grad);
  return gradients(arguments, request, params, gamma, beta);
}

STABLE_TORCH_LIBRARY_IMPL(cutlass_bn, CUDA, m) {
  m.impl("batch_norm_backward", TORCH_BOX(&batch_norm_backward));
  m.impl("batch_norm_inference_backward", TORCH_BOX(&batch_norm_inference_backward));
}

}  // namespace
}  // namespace cutlass_bn::ops
