// Every schema of the library. Kernels are registered in the other files of this folder; fake
// implementations and autograd formulas live in cutlass_bn/ops, beside each op's Python entry.
//
// `stats` is float32 [3, C]: the batch mean rounded to float32, the remainder of that rounding, and
// invstd (common/finalize.h).
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(cutlass_bn, m) {
  // BatchNorm over dim 1 of input [N, C, ...], dense in either memory format.
  m.def(
      "batch_norm_training(Tensor input, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
      "Tensor(c!)? num_batches_tracked, "
      "Tensor? weight, Tensor? bias, float? momentum, float eps) -> (Tensor y, Tensor stats)");
  m.def(
      "batch_norm_inference(Tensor input, Tensor running_mean, Tensor running_var, Tensor? weight, "
      "Tensor? bias, float eps) -> "
      "Tensor");
  // Gradients of the two above for that of their output. Only what is asked for is computed and
  // read: `input` and `stats` (the running statistics) are needed for the gradients of input and
  // weight, or, in eval, the variance alone for that of input. The gradients of weight and bias
  // come in the dtype given; None: not asked for. What is not asked for comes as an empty tensor.
  // The gradient of input has input's layout, or grad's where input is not given. grad may have any
  // strides.
  m.def(
      "batch_norm_backward(Tensor grad, Tensor? input, Tensor? stats, Tensor? weight, bool "
      "input_grad, ScalarType? weight_grad, "
      "ScalarType? bias_grad) -> (Tensor, Tensor, Tensor)");
  m.def(
      "batch_norm_inference_backward(Tensor grad, Tensor? input, Tensor? running_mean, Tensor? "
      "running_var, Tensor? weight, "
      "float eps, bool input_grad, ScalarType? weight_grad, ScalarType? bias_grad) -> (Tensor, "
      "Tensor, Tensor)");
  // How training goes on chip for this input (batch_norm/on_chip/plan.h): blocks that share a
  // channel, channels at a time, chunks a warp, channels ahead; zeros where a pass is of two
  // kernels. Reads no data.
  m.def("batch_norm_plan(Tensor input, bool backward) -> (int, int, int, int)");

  // fp32_products: how float32 products are made (linear_bn/policy.h): 0 IEEE, 1 TF32, 2 split.
  // act(BatchNorm1d(scale * (input weight^T + bias))); u = input weight^T, [M, N], with the bias in
  // half precision, without it in float32.
  m.def(
      "linear_batch_norm_stats(Tensor input, Tensor weight, Tensor? bias, Tensor? scale, "
      "Tensor(a!)? running_mean, "
      "Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, float? momentum, float eps, int "
      "fp32_products) -> "
      "(Tensor u, Tensor stats)");
  m.def(
      "linear_batch_norm_transform(Tensor input, Tensor weight, Tensor? bias, Tensor? scale, "
      "Tensor? gamma, Tensor? beta, "
      "Tensor u, Tensor stats, float eps, int activation, ScalarType dtype, int fp32_products) -> "
      "Tensor");
  // From the gradient of transform's output to those of u, scale, gamma and beta, as in
  // batch_norm_backward. grad is of u's dtype or float32; the gradient of u is of u's dtype, in
  // rows of whole 16-byte vectors. eps is that of stats.
  m.def(
      "linear_batch_norm_backward(Tensor grad, Tensor u, Tensor stats, Tensor? scale, Tensor? "
      "gamma, Tensor? beta, float eps, "
      "int activation, bool u_grad, ScalarType? scale_grad, ScalarType? gamma_grad, ScalarType? "
      "beta_grad) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "linear_batch_norm_inference(Tensor input, Tensor weight, Tensor? bias, Tensor? scale, "
      "Tensor running_mean, "
      "Tensor running_var, Tensor? gamma, Tensor? beta, float eps, int activation, ScalarType "
      "dtype, int fp32_products) -> Tensor");
  // Which path the two GEMM ops above take for these arguments (linear_bn/policy.h): "fused" or
  // "portable", the GEMM's tile, and why the path is portable. Reads no data.
  m.def(
      "linear_batch_norm_plan(Tensor input, Tensor weight, ScalarType dtype, int fp32_products, "
      "bool inference) -> "
      "(str, str, str)");

  // The parts of the split GEMM. planes float16 [2, rows, ld], exponents and census int32 [rows] of
  // the matrix or its transpose (linear_bn/split/split.h); a b, always by three fp16 products.
  m.def(
      "split_fp32(Tensor matrix, bool transposed) -> (Tensor planes, Tensor exponents, Tensor "
      "census)");
  m.def("split_matmul(Tensor a, Tensor b) -> Tensor");
  // The transpose of a float32 matrix with dense rows, written out in rows of whole 16-byte
  // vectors.
  m.def("transpose_fp32(Tensor matrix) -> Tensor");
}
