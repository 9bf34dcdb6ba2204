// Every schema of the library. Kernels are registered in the other files of this folder; fake
// implementations and autograd formulas live in cutlass_bn/ops, beside each op's Python entry.
//
// `stats` is float32 [3, C]: the batch mean rounded to float32, the remainder of that rounding, and
// invstd (common/finalize.h).
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(cutlass_bn, m) {
  // y = activation(BatchNorm(input) + residual) over dim 1 of input [N, C, ...]; activation as in
  // common/activation.h. residual is of input's shape and dtype; all may have any strides. y has
  // input's layout where that is dense, else the one that torch's batch norm gives.
  m.def(
      "batch_norm_training(Tensor input, Tensor? residual, Tensor(a!)? running_mean, "
      "Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, Tensor? weight, Tensor? bias, "
      "float? momentum, float eps, int activation) -> (Tensor y, Tensor stats)");
  m.def(
      "batch_norm_inference(Tensor input, Tensor? residual, Tensor running_mean, "
      "Tensor running_var, Tensor? weight, Tensor? bias, float eps, int activation) -> Tensor");
  // Gradients of the two above for that of their output. Only what is asked for is computed and
  // read. `after`: with a residual and an activation y (relu, leaky_relu) or the residual (gelu,
  // silu), else None. `input` and `stats` (in eval the running statistics) are needed for the
  // gradient of weight, in training for that of input, and for any through an activation but by y;
  // the variance for that of input in eval. Without an activation residual_grad is False: that
  // gradient is grad. The gradients of weight and bias come in the dtype given; None: not asked
  // for. What is not asked for comes as an empty tensor. The gradients of input and residual have
  // the layout that y has with the first that is given of input, after and grad in input's place.
  m.def(
      "batch_norm_backward(Tensor grad, Tensor? input, Tensor? stats, Tensor? weight, "
      "Tensor? bias, Tensor? after, int activation, bool input_grad, bool residual_grad, "
      "ScalarType? weight_grad, ScalarType? bias_grad) -> "
      "(Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias)");
  m.def(
      "batch_norm_inference_backward(Tensor grad, Tensor? input, Tensor? running_mean, "
      "Tensor? running_var, Tensor? weight, Tensor? bias, Tensor? after, float eps, "
      "int activation, bool input_grad, bool residual_grad, ScalarType? weight_grad, "
      "ScalarType? bias_grad) -> (Tensor, Tensor, Tensor, Tensor)");
  // How training goes on chip for this input (batch_norm/on_chip/plan.h): blocks that share a
  // channel, channels at a time, chunks a warp, channels ahead; zeros where a pass is of two
  // kernels. Reads no data.
  m.def("batch_norm_plan(Tensor input, bool backward) -> (int, int, int, int)");

  // fp32_products: how float32 products are made (linear_bn/policy.h): 0 IEEE, 1 TF32, 2 split.
  // y = act(BatchNorm1d(scale * (input weight^T + bias))) of `dtype`, input's or float32;
  // u = input weight^T, [M, N], with the bias in half precision, without it in float32, in rows of
  // whole 16-byte vectors.
  m.def(
      "linear_batch_norm_training(Tensor input, Tensor weight, Tensor? bias, Tensor? scale, "
      "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, "
      "Tensor? gamma, Tensor? beta, float? momentum, float eps, int activation, "
      "ScalarType dtype, int fp32_products) -> (Tensor y, Tensor u, Tensor stats)");
  // Its gradients: of input, weight, bias, scale, gamma and beta, as in batch_norm_backward. grad
  // is of u's dtype or float32.
  m.def(
      "linear_batch_norm_backward(Tensor grad, Tensor input, Tensor weight, Tensor u, Tensor "
      "stats, "
      "Tensor? scale, Tensor? gamma, Tensor? beta, float eps, int activation, int fp32_products, "
      "bool input_grad, bool weight_grad, ScalarType? bias_grad, ScalarType? scale_grad, "
      "ScalarType? gamma_grad, ScalarType? beta_grad) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "linear_batch_norm_inference(Tensor input, Tensor weight, Tensor? bias, Tensor? scale, "
      "Tensor running_mean, Tensor running_var, Tensor? gamma, Tensor? beta, float eps, "
      "int activation, ScalarType dtype, int fp32_products) -> Tensor");
  // Which path the two GEMM ops above take for these arguments (linear_bn/policy.h): "fused" or
  // "portable", the GEMM's tile, and why the path is portable. Reads no data.
  m.def(
      "linear_batch_norm_plan(Tensor input, Tensor weight, ScalarType dtype, int fp32_products, "
      "bool inference) -> "
      "(str, str, str)");

  // a b of float32 matrices, as precise as the products of the ops above: by torch, by torch after
  // a transpose in memory, or by the split GEMM. always_split: however small they are.
  m.def("fp32_matmul(Tensor a, Tensor b, int fp32_products, bool always_split=False) -> Tensor");
}
