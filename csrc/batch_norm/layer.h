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

// Training: y, the statistics, the running ones and the counter.
struct ForwardParams {
  void const* x = nullptr;    // as the plan's view says
  void* y = nullptr;          // the same layout and dtype
  ChannelVector gamma, beta;  // [channels]; absent: 1, 0
  FinalizeParams finalize;    // the batch's statistics and the running ones: stats, running_mean,
                              // running_var, counter, momentum, eps
};

// aligned: x and y are at multiples of 16 bytes.
Plan plan_forward(ChannelView const& view, DType dtype, bool aligned);
void launch_forward(Plan const& plan, ForwardParams const& params, void* workspace,
                    cudaStream_t stream);

// Eval: y from running statistics, in one kernel.
void launch_inference(TransformParams const& params, cudaStream_t stream);

// Which gradients a backward is asked for.
struct Wanted {
  bool dx = false, dgamma = false, dbeta = false;
};

struct BackwardParams {
  void const* dy = nullptr;  // as the plan's view says
  void const* x = nullptr;   // the same layout and dtype, as is dx; read for dx in training and for
                             // dgamma
  void* dx = nullptr;
  float const* stats = nullptr;             // [3, channels] of the training forward; null: eval
  ChannelVector running_mean, running_var;  // [channels]; of eval, for dgamma and for dx and dgamma
  double eps = 1e-5;                        // goes with running_var
  ChannelVector gamma;                      // [channels]; absent: 1
  MutableChannelVector dgamma, dbeta;       // [channels]
};

// of_batch: the gradients of training. aligned: all tensors are at multiples of 16 bytes.
Plan plan_backward(ChannelView const& view, DType dtype, Wanted const& wanted, bool of_batch,
                   bool aligned);
void launch_backward(Plan const& plan, Wanted const& wanted, BackwardParams const& params,
                     void* workspace, cudaStream_t stream);

}  // namespace cutlass_bn::batch_norm
