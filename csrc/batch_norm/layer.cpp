#include "batch_norm/layer.h"

#include <algorithm>

#include "batch_norm/kernels.h"
#include "common/workspace.h"

namespace cutlass_bn::batch_norm {
namespace {

struct ForwardWorkspace {
  TileMomentsOut moments;
  float4* exchange;
  int64_t bytes;

  ForwardWorkspace(Plan const& plan, void* memory) {
    Workspace passes(memory), on_chip(memory);  // one or the other
    int64_t const values = plan.tiles() * plan.view.channels;
    moments = {passes.take<float2>(values), passes.take<float>(values)};
    exchange = on_chip.take<float4>(plan.on_chip ? plan.on_chip->exchange_values() : 0);
    bytes = std::max(passes.bytes(), on_chip.bytes());
  }
};

struct BackwardWorkspace {
  float2* partials;
  GradientMaps maps;
  float4* exchange;
  int64_t bytes;

  BackwardWorkspace(Plan const& plan, bool with_maps, void* memory) {
    Workspace passes(memory), on_chip(memory);
    int64_t const channels = plan.view.channels;
    partials = passes.take<float2>(plan.tiles() * channels);
    if (with_maps) maps = {passes.take<float4>(channels), passes.take<float>(channels)};
    exchange = on_chip.take<float4>(plan.on_chip ? plan.on_chip->exchange_values() : 0);
    bytes = std::max(passes.bytes(), on_chip.bytes());
  }
};

bool reads_x(Wanted const& wanted, bool of_batch) {
  return (wanted.dx && of_batch) || wanted.dgamma;
}

void launch_transform(TransformParams const& params, cudaStream_t stream) {
  (uses_columns(params.view) ? columns::launch_transform : planes::launch_transform)(params,
                                                                                     stream);
}

// dgamma, dbeta and the maps of dx.
void launch_reduction(Plan const& plan, BackwardParams const& p, GradientFinalizeParams finalize,
                      BackwardWorkspace const& workspace, bool with_x, cudaStream_t stream) {
  GradientSumsParams sums;
  sums.dy = p.dy;
  sums.x = with_x ? p.x : nullptr;
  sums.dtype = plan.dtype;
  sums.view = plan.view;
  sums.mean = p.stats != nullptr ? ChannelVector{p.stats, DType::kFloat32} : p.running_mean;
  sums.rows_per_tile = plan.rows_per_tile;
  sums.partials = workspace.partials;
  (uses_columns(plan.view) ? columns::launch_gradient_sums : planes::launch_gradient_sums)(sums,
                                                                                           stream);

  finalize.partials = workspace.partials;
  finalize.tiles = plan.tiles();
  finalize.maps = workspace.maps;
  if (!with_x) finalize.stats = nullptr;
  launch_gradient_finalize(finalize, stream);
}

}  // namespace

Plan plan_forward(ChannelView const& view, DType dtype, bool aligned) {
  Plan plan{view, dtype, aligned ? plan_on_chip(view, dtype, false) : std::nullopt,
            choose_rows_per_tile(view, dtype)};
  plan.workspace_bytes = ForwardWorkspace(plan, nullptr).bytes;
  return plan;
}

void launch_forward(Plan const& plan, ForwardParams const& p, void* memory, cudaStream_t stream) {
  ForwardWorkspace const workspace(plan, memory);
  FinalizeParams finalize = p.finalize;
  finalize.channels = plan.view.channels;
  finalize.rows = plan.view.rows();
  if (plan.on_chip &&
      on_chip::launch_forward({p.x, p.y, plan.dtype, p.gamma, p.beta, finalize, workspace.exchange},
                              *plan.on_chip, stream)) {
    return;
  }
  StatsParams const stats{p.x, plan.dtype, plan.view, plan.rows_per_tile, workspace.moments};
  (uses_columns(plan.view) ? columns::launch_stats : planes::launch_stats)(stats, stream);
  finalize.partials = workspace.moments.partials;
  finalize.remainders = workspace.moments.remainders;
  finalize.tiles = plan.tiles();
  finalize.rows_per_tile = plan.rows_per_tile;
  launch_finalize(finalize, stream);
  TransformParams transform{p.x, p.y, plan.dtype, plan.view, finalize.stats, {}};
  transform.layer.gamma = p.gamma;
  transform.layer.beta = p.beta;
  launch_transform(transform, stream);
}

void launch_inference(TransformParams const& params, cudaStream_t stream) {
  launch_transform(params, stream);
}

Plan plan_backward(ChannelView const& view, DType dtype, Wanted const& wanted, bool of_batch,
                   bool aligned) {
  bool const with_maps = wanted.dx && of_batch;
  Plan plan{view, dtype, with_maps && aligned ? plan_on_chip(view, dtype, true) : std::nullopt,
            choose_gradient_rows_per_tile(view, dtype, reads_x(wanted, of_batch))};
  plan.workspace_bytes = BackwardWorkspace(plan, with_maps, nullptr).bytes;
  return plan;
}

void launch_backward(Plan const& plan, Wanted const& wanted, BackwardParams const& p, void* memory,
                     cudaStream_t stream) {
  bool const of_batch = p.stats != nullptr, with_maps = wanted.dx && of_batch;
  BackwardWorkspace const workspace(plan, with_maps, memory);
  GradientFinalizeParams finalize;
  finalize.channels = plan.view.channels;
  finalize.rows = plan.view.rows();
  finalize.stats = p.stats;
  finalize.running_var = p.running_var;
  finalize.eps = p.eps;
  finalize.gamma = p.gamma;
  finalize.dgamma = p.dgamma;
  finalize.dbeta = p.dbeta;
  if (plan.on_chip &&
      on_chip::launch_backward({p.dy, p.x, p.dx, plan.dtype, finalize, workspace.exchange},
                               *plan.on_chip, stream)) {
    return;
  }
  if (with_maps || wanted.dgamma || wanted.dbeta) {
    launch_reduction(plan, p, finalize, workspace, reads_x(wanted, of_batch), stream);
  }
  if (with_maps) {
    GradientTransformParams const transform{p.dy, p.x, p.dx, plan.dtype, plan.view, workspace.maps};
    (uses_columns(plan.view) ? columns::launch_gradient_transform
                             : planes::launch_gradient_transform)(transform, stream);
  } else if (wanted.dx) {
    TransformParams transform{p.dy, p.dx, plan.dtype, plan.view, nullptr, {}};
    transform.layer.running_var = p.running_var;
    transform.layer.eps = p.eps;
    transform.layer.gamma = p.gamma;
    launch_transform(transform, stream);
  }
}

}  // namespace cutlass_bn::batch_norm
