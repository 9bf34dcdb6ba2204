// Batch normalisation over the channels of a dense activation, one call a pass: plan, allocate the
// plan's workspace, launch. No pass synchronises or allocates, and none takes an empty input.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <optional>

#include "batch_norm/on_chip/plan.h"
#include "batch_norm/params.h"
#include "common/math.h"

namespace cutlass_bn::batch_norm {

// How a pass goes. Depends on nothing but the arguments of plan_*() and the device.
struct Plan {
  ChannelView view;
  DType dtype = DType::kFloat32;
  std::optional<OnChipPlan> on_chip;  // one kernel that reads each tensor once; none: kernels of
                                      // two passes
  int64_t rows_per_tile = 0;  // of the two passes, which also stand in where the launch on chip is
                              // refused
  int64_t workspace_bytes = 0;  // 256-byte aligned

  int64_t tiles() const { return ceil_div(view.rows(), rows_per_tile); }
};

// Training: y = activation(BatchNorm(x) + residual), the statistics, the running ones and the
// counter.
struct ForwardParams {
  void const* x = nullptr;         // as the plan's view says
  void const* residual = nullptr;  // the same layout and dtype, as is y; null: none
  void* y = nullptr;
  ChannelVector gamma, beta;  // [channels]; absent: 1, 0
  Activation activation = Activation::kNone;
  FinalizeParams finalize;  // the batch's statistics and the running ones: stats, running_mean,
                            // running_var, counter, momentum, eps
};

// aligned: x and y are at multiples of 16 bytes. With a residual nothing is kept on chip: a third
// tensor takes what that gains.
Plan plan_forward(ChannelView const& view, DType dtype, bool aligned, bool with_residual = false);
void launch_forward(Plan const& plan, ForwardParams const& params, void* workspace,
                    cudaStream_t stream);

// Eval: y from running statistics, in one kernel.
void launch_inference(TransformParams const& params, cudaStream_t stream);

// What a backward is asked for, and what it is given for that.
struct BackwardRequest {
  ChannelView view;
  DType dtype = DType::kFloat32;
  Activation activation = Activation::kNone;
  bool with_residual = false;  // one was added before the activation
  bool of_batch = true;        // training
  bool dx = false, dresidual = false, dgamma = false, dbeta = false;
  bool aligned = false;  // all tensors of the view's size are at multiples of 16 bytes

  bool any() const { return dx || dresidual || dgamma || dbeta; }
  Saved saved() const { return saved_for(activation, with_residual); }
  bool reads_saved() const { return any() && saved() != Saved::kNothing; }
  // v has to be worked out again.
  bool makes_v() const {
    return any() && activation != Activation::kNone && saved() != Saved::kOutput;
  }
  bool reads_x() const { return (dx && of_batch) || dgamma || makes_v(); }
};

struct BackwardParams {
  void const* dy = nullptr;      // as the plan's view says, of its dtype, as are the others here
  void const* x = nullptr;       // where the request reads_x()
  void const* saved = nullptr;   // y or the residual, as saved() says, where the request
                                 // reads_saved()
  void* dx = nullptr;            // where asked for, as are the other gradients
  void* dresidual = nullptr;     // only with an activation: else it is dy
  float const* stats = nullptr;  // [3, channels] of the training forward, with reads_x(); null:
                                 // eval
  Layer layer;                   // without bias and scale
  MutableChannelVector dgamma, dbeta;  // [channels]
};

Plan plan_backward(BackwardRequest const& request);
void launch_backward(Plan const& plan, BackwardRequest const& request, BackwardParams const& params,
                     void* workspace, cudaStream_t stream);

}  // namespace cutlass_bn::batch_norm
