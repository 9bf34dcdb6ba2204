// Linear, scale, BatchNorm1d and activation, one call a pass: plan, allocate the plan's workspace,
// launch. No pass synchronises or allocates, and none takes an empty matrix.
//
// With u = x W^T [M, N] (in half precision with the bias, which belongs to the value that is
// rounded; in float32 without it, for moments that a large bias can't hurt), the layer's output is
// y = act(BatchNorm(scale * (u + bias))).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>

#include "common/finalize.h"
#include "common/layer.h"
#include "common/math.h"
#include "linear_bn/policy.h"

namespace cutlass_bn::linear_bn {

// Whether u holds the bias.
inline bool takes_bias(DType dtype) { return dtype != DType::kFloat32; }

// The product u of the portable path, which is the caller's own.
using Product = std::function<void()>;

struct TrainingPlan {
  Plan product;
  int64_t m = 0, n = 0;
  DType dtype = DType::kFloat32;
  int64_t rows_per_tile = 0;
  int64_t workspace_bytes = 0;  // 256-byte aligned

  int64_t tiles() const { return ceil_div(m, rows_per_tile); }
};

// u, the statistics, the running ones, the counter and y.
struct TrainingParams {
  void* u = nullptr;  // [M, N] of the operands' dtype; row stride ldu, 16-byte aligned
  int64_t ldu = 0;    // elements; that of the request
  void* y = nullptr;  // [M, N] of y_dtype; null: not asked for
  int64_t ldy = 0;    // elements
  DType y_dtype = DType::kFloat32;  // that of the operands or float32
  ChannelVector bias;               // [N], in half precision of the operands' dtype; absent: 0
  FinalizeParams finalize;    // scale, stats, running_mean, running_var, counter, momentum, eps
  ChannelVector gamma, beta;  // [N]; absent: 1, 0
  Activation activation = Activation::kNone;
};

TrainingPlan plan_training(Request const& request);

void launch_training(TrainingPlan const& plan, TrainingParams const& params, void* workspace,
                     Product const& product, cudaStream_t stream);

struct InferencePlan {
  Plan product;
  int64_t m = 0, n = 0;
  DType dtype = DType::kFloat32, y_dtype = DType::kFloat32;
  int64_t workspace_bytes = 0;  // 256-byte aligned
};

struct InferenceParams {
  void* y = nullptr;        // [M, N] of the request's out_dtype; row stride ldy, 16-byte aligned
  int64_t ldy = 0;          // elements; that of the request
  void const* u = nullptr;  // [M, N] of the operands' dtype, where `product` leaves it; may be y;
                            // of the portable path alone
  int64_t ldu = 0;          // elements
  Layer layer;              // vectors of [N]
};

InferencePlan plan_inference(Request const& request);
void launch_inference(InferencePlan const& plan, InferenceParams const& params, void* workspace,
                      Product const& product, cudaStream_t stream);

// From the gradient of y to those of u and the vectors, in training.
struct BackwardParams {
  void const* dy = nullptr;  // [M, N] of dy_dtype
  void const* u = nullptr;   // [M, N] of dtype, as the forward left it
  void* du = nullptr;        // [M, N] of dtype; null: not asked for
  int64_t m = 0, n = 0;
  DType dy_dtype = DType::kFloat32, dtype = DType::kFloat32;       // dy_dtype: dtype or float32
  int64_t dy_row_stride = 0, u_row_stride = 0, du_row_stride = 0;  // elements
  float const* stats = nullptr;                                    // [3, N] of the forward
  Layer layer;  // scale, gamma, beta, eps and activation
  // [N]; absent: not asked for. dbias is 0, and made beside another gradient alone.
  MutableChannelVector dbias, dscale, dgamma, dbeta;
};

int64_t backward_workspace_bytes(BackwardParams const& params);
void launch_backward(BackwardParams const& params, void* workspace, cudaStream_t stream);

}  // namespace cutlass_bn::linear_bn
