// act(BatchNorm1d(scale * (input weight^T + bias))). Arguments are checked before anything is allocated, launched or changed.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <tuple>

#include "batch_norm/launch.h"
#include "common/device_info.h"
#include "common/finalize.h"
#include "linear_bn/launch.h"
#include "ops/channel_view.h"
#include "ops/matrix_args.h"

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
  CUTLASS_BN_CHECK(weight.dim() == 2, "weight: expected 2 dimensions, got shape ", shape_of(weight));
  Problem const problem{input.size(0), weight.size(0), input.size(1), dtype_of(input, "input")};
  check_on_device_of(weight, "weight", input);
  check_shape(weight, "weight", {problem.n, problem.k});
  DType const dtype = dtype_of(weight, "weight");
  CUTLASS_BN_CHECK(dtype == problem.dtype, "weight: expected ", name_of(problem.dtype), " like input, got ", name_of(dtype));
  return problem;
}

DType check_out_dtype(ScalarType dtype, DType input_dtype) {
  CUTLASS_BN_CHECK(dtype == ScalarType::Float || dtype == scalar_type_of(input_dtype), "dtype: expected that of input (",
                   name_of(input_dtype), ") or float32, got ScalarType code ", static_cast<int>(dtype));
  return dtype == ScalarType::Float ? DType::kFloat32 : input_dtype;
}

linear_bn::Fp32Products check_fp32_products(int64_t code) {
  CUTLASS_BN_CHECK(code >= 0 && code <= static_cast<int64_t>(linear_bn::Fp32Products::kSplit),
                   "fp32_products: expected 0 (IEEE), 1 (TF32) or 2 (split), got ", code);
  return static_cast<linear_bn::Fp32Products>(code);
}

// Of the current device.
linear_bn::Plan plan_for(Tensor const& input, Tensor const& weight, DType dtype, int64_t out_row_stride, DType out_dtype,
                         int64_t fp32_products) {
  DeviceInfo const& device = device_info();
  linear_bn::Request request;
  request.x = view_of(input);
  request.w = view_of(weight);
  request.dtype = dtype;
  request.out_row_stride = out_row_stride;
  request.out_dtype = out_dtype;
  request.fp32_products = check_fp32_products(fp32_products);
  request.compute_capability = device.compute_capability;
  request.sm_count = device.sm_count;
  return linear_bn::choose_plan(request);
}

class NoGradGuard {
 public:
  NoGradGuard() { aoti_torch_grad_mode_set_enabled(false); }
  ~NoGradGuard() { aoti_torch_grad_mode_set_enabled(enabled_); }
  NoGradGuard(NoGradGuard const&) = delete;
  NoGradGuard& operator=(NoGradGuard const&) = delete;

 private:
  bool enabled_ = aoti_torch_grad_mode_is_enabled();
};

// A view, without the dispatcher's detour. The 0 counts from matrix's own offset.
Tensor transposed(Tensor const& matrix) {
  return with_strides(matrix, {matrix.size(1), matrix.size(0)}, {matrix.stride(1), matrix.stride(0)});
}

// Whether u holds the bias: it belongs to the value that is rounded where rounding is coarse. In float32 it is left to what follows, for
// moments of u that a large bias can't hurt.
bool takes_bias(DType dtype) { return dtype != DType::kFloat32; }

Tensor converted(Tensor const& t, ScalarType dtype) {
  if (t.scalar_type() == dtype) return t;
  Tensor copy = empty({t.size(0)}, dtype, t);
  torch::stable::copy_(copy, t);
  return copy;
}

// u = input weight^T (+ bias) by torch, which follows its own precision switches and handles every stride, and an empty K.
void matmul_into(Tensor const& u, Tensor const& input, Tensor const& weight, std::optional<Tensor> const& bias) {
  NoGradGuard const no_grad;
  if (bias) {
    CUTLASS_BN_CHECK(aoti_torch_cuda_addmm_out(u.get(), converted(*bias, u.scalar_type()).get(), input.get(),
                                               transposed(weight).get(), 1.0, 1.0) == AOTI_TORCH_SUCCESS,
                     "torch could not multiply input ", shape_of(input), " and weight ", shape_of(weight));
    return;
  }
  std::array<StableIValue, 3> stack{torch::stable::detail::from(input), torch::stable::detail::from(transposed(weight)),
                                    torch::stable::detail::from(u)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);  // takes over the returned reference
}

std::tuple<Tensor, Tensor> linear_batch_norm_stats(Tensor const& input, Tensor const& weight, std::optional<Tensor> const& bias,
                                                   std::optional<Tensor> const& scale, std::optional<Tensor> const& running_mean,
                                                   std::optional<Tensor> const& running_var,
                                                   std::optional<Tensor> const& num_batches_tracked, std::optional<double> momentum,
                                                   double eps, int64_t fp32_products) {
  Problem const p = check_operands(input, weight);
  CUTLASS_BN_CHECK(p.m != 1, "input: expected more than 1 row for the statistics of a batch, got shape ", shape_of(input));
  RunningBuffers const running = running_buffers(running_mean, running_var, num_batches_tracked, p.n, input);
  CUTLASS_BN_CHECK(momentum || !running.mean || running.num_batches_tracked,
                   "momentum: expected a number, or num_batches_tracked for a cumulative average, got neither");
  FinalizeParams finalize;
  finalize.channels = p.n;
  finalize.rows = p.m;
  finalize.scale = channel_vector(scale, "scale", p.n, input);
  ChannelVector const bias_vector = channel_vector(bias, "bias", p.n, input);
  bool const biased = takes_bias(p.dtype) && bias_vector;
  if (!biased) finalize.bias = bias_vector;
  finalize.running_mean = running.mean;
  finalize.running_var = running.var;
  finalize.num_batches_tracked = running.num_batches_tracked;
  finalize.momentum = momentum.value_or(0.0);
  finalize.cumulative = !momentum && running.num_batches_tracked;
  finalize.eps = eps;

  DeviceGuard const guard(input.get_device_index());
  cudaStream_t const stream = current_stream(input);
  int64_t const ldu = padded_row(p.n, p.dtype);
  Tensor const u = empty_padded(p.m, p.n, input.scalar_type(), input);
  Tensor const stats = empty({3, p.n}, ScalarType::Float, input);
  finalize.stats = static_cast<float*>(stats.mutable_data_ptr());
  if (p.m == 0 || p.n == 0) {
    if (p.n != 0) CUTLASS_BN_CUDA(cudaMemsetAsync(finalize.stats, 0, 3 * p.n * sizeof(float), stream));
    if (finalize.num_batches_tracked != nullptr) launch_count_batch(finalize.num_batches_tracked, stream);
    return {u, stats};
  }

  linear_bn::Plan const plan = plan_for(input, weight, p.dtype, ldu, p.dtype, fp32_products);
  finalize.rows_per_tile =
      plan.path == Path::kPortable ? batch_norm::choose_rows_per_tile(p.m, p.n, p.dtype) : gemm::shape_of(plan.tile).m;
  finalize.tiles = (p.m + finalize.rows_per_tile - 1) / finalize.rows_per_tile;
  Tensor const workspace = tile_moments_workspace(finalize, input);
  batch_norm::TileMomentsOut const out = take_tile_moments(workspace, finalize);
  if (plan.path != Path::kPortable) {
    finalize.remainders = nullptr;  // the epilogues have none
    gemm::MomentsParams moments;
    moments.operands = plan.operands;
    moments.u = u.mutable_data_ptr();
    moments.ldu = ldu;
    moments.partials = out.partials;
    moments.tile = plan.tile;
    if (biased) moments.bias = bias_vector;
    if (plan.path == Path::kSplit) {
      Tensor const memory = split_workspace(plan.split, input);
      linear_bn::launch_split_moments(plan.split, moments, memory.mutable_data_ptr(), stream);
    } else {
      gemm::launch_moments(moments, stream);
    }
  } else {
    matmul_into(u, input, weight, biased ? bias : std::nullopt);
    batch_norm::ColumnMomentsParams moments;
    moments.x = u.const_data_ptr();
    moments.dtype = p.dtype;
    moments.rows = p.m;
    moments.channels = p.n;
    moments.row_stride = ldu;
    moments.rows_per_tile = finalize.rows_per_tile;
    moments.out = out;
    batch_norm::launch_column_moments(moments, stream);
  }
  launch_finalize(finalize, stream);
  return {u, stats};
}

linear_bn::NormalizeTensors normalize_tensors(Tensor const& u, Tensor const& y, DType u_dtype, DType y_dtype,
                                              Activation activation) {
  linear_bn::NormalizeTensors tensors;
  tensors.u = u.const_data_ptr();
  tensors.y = y.mutable_data_ptr();
  tensors.ldu = u.stride(0);
  tensors.ldy = y.stride(0);
  tensors.m = u.size(0);
  tensors.n_end = u.size(1);
  tensors.u_dtype = u_dtype;
  tensors.y_dtype = y_dtype;
  tensors.activation = activation;
  return tensors;
}

// input, weight, bias, eps and fp32_products are here for the autograd formula alone: y depends on them through u and stats.
Tensor linear_batch_norm_transform(Tensor const& input, Tensor const& weight, std::optional<Tensor> const& bias,
                                   std::optional<Tensor> const& scale, std::optional<Tensor> const& gamma,
                                   std::optional<Tensor> const& beta, Tensor const& u, Tensor const& stats, double /* eps */,
                                   int64_t activation, ScalarType dtype, int64_t fp32_products) {
  Problem const p = check_operands(input, weight);
  check_fp32_products(fp32_products);
  channel_vector(bias, "bias", p.n, input);
  check_on_device_of(u, "u", input);
  check_shape(u, "u", {p.m, p.n});
  CUTLASS_BN_CHECK(u.scalar_type() == input.scalar_type(), "u: expected ", name_of(p.dtype), " like input, got ",
                   name_of(dtype_of(u, "u")));
  check_dense_rows(u, "u");
  DType const y_dtype = check_out_dtype(dtype, p.dtype);
  linear_bn::NormalizeParams params;
  params.stats = stats_data(stats, p.n, input);
  params.n = p.n;
  params.scale = channel_vector(scale, "scale", p.n, input);
  params.gamma = channel_vector(gamma, "gamma", p.n, input);
  params.beta = channel_vector(beta, "beta", p.n, input);
  Activation const function = activation_of(activation);

  DeviceGuard const guard(input.get_device_index());
  Tensor const y = empty({p.m, p.n}, dtype, input);
  params.tensors = normalize_tensors(u, y, p.dtype, y_dtype, function);
  linear_bn::launch_normalize(params, current_stream(input));
  return y;
}

Tensor linear_batch_norm_inference(Tensor const& input, Tensor const& weight, std::optional<Tensor> const& bias,
                                   std::optional<Tensor> const& scale, Tensor const& running_mean, Tensor const& running_var,
                                   std::optional<Tensor> const& gamma, std::optional<Tensor> const& beta, double eps,
                                   int64_t activation, ScalarType dtype, int64_t fp32_products) {
  Problem const p = check_operands(input, weight);
  DType const y_dtype = check_out_dtype(dtype, p.dtype);
  linear_bn::NormalizeInferenceParams params;
  params.bias = channel_vector(bias, "bias", p.n, input);
  params.scale = channel_vector(scale, "scale", p.n, input);
  params.running_mean = channel_vector(running_mean, "running_mean", p.n, input);
  params.running_var = channel_vector(running_var, "running_var", p.n, input);
  params.gamma = channel_vector(gamma, "gamma", p.n, input);
  params.beta = channel_vector(beta, "beta", p.n, input);
  params.eps = static_cast<float>(eps);
  Activation const function = activation_of(activation);

  DeviceGuard const guard(input.get_device_index());
  cudaStream_t const stream = current_stream(input);
  Tensor const y = empty({p.m, p.n}, dtype, input);
  if (p.m == 0 || p.n == 0) return y;
  linear_bn::Plan const plan = plan_for(input, weight, p.dtype, p.n, y_dtype, fp32_products);
  if (plan.path != Path::kPortable) {
    gemm::InferenceParams fused;
    fused.operands = plan.operands;
    fused.y = y.mutable_data_ptr();
    fused.ldy = p.n;
    fused.y_dtype = y_dtype;
    fused.bias = params.bias;
    fused.scale = params.scale;
    fused.running_mean = params.running_mean;
    fused.running_var = params.running_var;
    fused.gamma = params.gamma;
    fused.beta = params.beta;
    fused.eps = params.eps;
    fused.activation = function;
    fused.tile = plan.tile;
    if (plan.path == Path::kSplit) {
      Tensor const memory = split_workspace(plan.split, input);
      linear_bn::launch_split_inference(plan.split, fused, memory.mutable_data_ptr(), stream);
    } else {
      gemm::launch_inference(fused, stream);
    }
  } else {
    Tensor const u = y_dtype == p.dtype ? y : empty({p.m, p.n}, input.scalar_type(), input);
    bool const biased = takes_bias(p.dtype) && bias.has_value();
    matmul_into(u, input, weight, biased ? bias : std::nullopt);
    if (biased) params.bias = {};
    params.tensors = normalize_tensors(u, y, p.dtype, y_dtype, function);
    linear_bn::launch_normalize_inference(params, stream);
  }
  return y;
}

std::string linear_batch_norm_plan(Tensor const& input, Tensor const& weight, ScalarType dtype, int64_t fp32_products,
                                   bool inference) {
  Problem const p = check_operands(input, weight);
  DType const y_dtype = check_out_dtype(dtype, p.dtype);
  DeviceGuard const guard(input.get_device_index());
  return linear_bn::describe(inference ? plan_for(input, weight, p.dtype, p.n, y_dtype, fp32_products)
                                       : plan_for(input, weight, p.dtype, padded_row(p.n, p.dtype), p.dtype, fp32_products));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cutlass_bn, CUDA, m) {
  m.impl("linear_batch_norm_stats", TORCH_BOX(&linear_batch_norm_stats));
  m.impl("linear_batch_norm_transform", TORCH_BOX(&linear_batch_norm_transform));
  m.impl("linear_batch_norm_inference", TORCH_BOX(&linear_batch_norm_inference));
  m.impl("linear_batch_norm_plan", TORCH_BOX(&linear_batch_norm_plan));
}

}  // namespace cutlass_bn::ops
