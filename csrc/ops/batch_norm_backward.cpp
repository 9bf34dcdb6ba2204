// Gradients of BatchNorm over dim 1. Arguments are checked before anything is allocated or
// launched.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "batch_norm/layer.h"
#include "ops/channel_view.h"
#include "ops/tensor_args.h"

namespace cutlass_bn::ops {
namespace {

using batch_norm::ChannelView;
using torch::stable::accelerator::DeviceGuard;

using Gradients = std::tuple<Tensor, Tensor, Tensor>;  // dx, dweight, dbias; empty where not asked
                                                       // for

// Whether dx is asked for, and the dtypes of the others.
struct Asked {
  bool dx;
  std::optional<ScalarType> dweight, dbias;
};

void check_arguments(Tensor const& grad, std::optional<Tensor> const& input, Asked const& asked) {
  check_input(grad, "grad");
  DType const dtype = dtype_of(grad, "grad");
  if (asked.dweight) dtype_of(*asked.dweight, "weight_grad");
  if (asked.dbias) dtype_of(*asked.dbias, "bias_grad");
  if (!input) return;
  check_on_device_of(grad, "grad", *input);
  bool same = grad.dim() == input->dim();
  for (int64_t dim = 0; same && dim < grad.dim(); ++dim) same = grad.size(dim) == input->size(dim);
  CUTLASS_BN_CHECK(same, "grad: expected shape ", shape_of(*input), " like input, got ",
                   shape_of(grad));
  DType const expected = dtype_of(*input, "input");
  CUTLASS_BN_CHECK(dtype == expected, "grad: expected ", name_of(expected), " like input, got ",
                   name_of(dtype));
  channel_view(*input);
}

Tensor const& required(std::optional<Tensor> const& t, char const* name, char const* gradient) {
  CUTLASS_BN_CHECK(t.has_value(), name, ": expected a tensor, as the gradient of ", gradient,
                   " is asked for, got None");
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
  for (std::size_t dim = contiguous.size() - 1; dim-- > 0;)
    contiguous[dim] = contiguous[dim + 1] * grad.sizes()[dim + 1];
  Tensor dense = input ? empty_with_layout_of(*input)
                       : empty_strided(grad.sizes(), contiguous, grad.scalar_type(),
                                       grad.get_device_index());
  torch::stable::copy_(dense, grad);
  return dense;
}

// params: without tensors of the input's size and the gradients.
Gradients gradients(Tensor const& any_grad, std::optional<Tensor> const& input,
                    batch_norm::BackwardParams params, Asked const& asked) {
  int64_t const channels = any_grad.size(1);
  DeviceGuard const guard(any_grad.get_device_index());
  cudaStream_t const stream = current_stream(any_grad);
  Tensor const grad = dense_gradient(any_grad, input);
  Tensor const dx = asked.dx ? empty_with_layout_of(input ? *input : grad)
                             : empty({0}, grad.scalar_type(), grad);
  VectorGradient const dweight(asked.dweight, channels, grad), dbias(asked.dbias, channels, grad);
  if (grad.numel() == 0) {
    fill_with_zeros(dweight.tensor, stream);
    fill_with_zeros(dbias.tensor, stream);
  } else {
    batch_norm::Wanted const wanted{asked.dx, asked.dweight.has_value(), asked.dbias.has_value()};
    bool const of_batch = params.stats != nullptr,
               reads_x = (wanted.dx && of_batch) || wanted.dgamma;
    params.dy = grad.const_data_ptr();
    params.x = reads_x ? input->const_data_ptr() : nullptr;
    params.dx = wanted.dx ? dx.mutable_data_ptr() : nullptr;
    params.dgamma = dweight.vector;
    params.dbeta = dbias.vector;
    bool const aligned = is_aligned(params.dy) && is_aligned(params.x) && is_aligned(params.dx);
    auto const plan = batch_norm::plan_backward(*dense_view(grad), dtype_of(grad, "grad"), wanted,
                                                of_batch, aligned);
    WorkspaceMemory const workspace(plan.workspace_bytes, grad);
    batch_norm::launch_backward(plan, wanted, params, workspace.data(), stream);
  }
  return {dx, dweight.tensor, dbias.tensor};
}

Gradients batch_norm_backward(Tensor const& grad, std::optional<Tensor> const& input,
                              std::optional<Tensor> const& stats,
                              std::optional<Tensor> const& weight, bool input_grad,
                              std::optional<ScalarType> weight_grad,
                              std::optional<ScalarType> bias_grad) {
  Asked const asked{input_grad, weight_grad, bias_grad};
  check_arguments(grad, input, asked);
  batch_norm::BackwardParams params;
  if (input_grad || weight_grad) {
    char const* const gradient = input_grad ? "input" : "weight";
    required(input, "input", gradient);
    params.stats = stats_data(required(stats, "stats", gradient), grad.size(1), grad);
  }
  params.gamma = channel_vector(weight, "weight", grad.size(1), grad);
  return gradients(grad, input, params, asked);
}

Gradients batch_norm_inference_backward(Tensor const& grad, std::optional<Tensor> const& input,
                                        std::optional<Tensor> const& running_mean,
                                        std::optional<Tensor> const& running_var,
                                        std::optional<Tensor> const& weight, double eps,
                                        bool input_grad, std::optional<ScalarType> weight_grad,
                                        std::optional<ScalarType> bias_grad) {
  Asked const asked{input_grad, weight_grad, bias_grad};
  check_arguments(grad, input, asked);
  int64_t const channels = grad.size(1);
  batch_norm::BackwardParams params;
  params.eps = eps;
  if (weight_grad) {
    required(input, "input", "weight");
    params.running_mean = channel_vector(required(running_mean, "running_mean", "weight"),
                                         "running_mean", channels, grad);
  }
  if (input_grad || weight_grad) {
    Tensor const& variance = required(running_var, "running_var", input_grad ? "input" : "weight");
    params.running_var = channel_vector(variance, "running_var", channels, grad);
  }
  params.gamma = channel_vector(weight, "weight", channels, grad);
  return gradients(grad, input, params, asked);
}

STABLE_TORCH_LIBRARY_IMPL(cutlass_bn, CUDA, m) {
  m.impl("batch_norm_backward", TORCH_BOX(&batch_norm_backward));
  m.impl("batch_norm_inference_backward", TORCH_BOX(&batch_norm_inference_backward));
}

}  // namespace
}  // namespace cutlass_bn::ops
