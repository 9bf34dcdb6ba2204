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

  BackwardWorkspace(Plan const& plan, BackwardRequest const& request, void* memory) {
    Workspace passes(memory), on_chip(memory);
    int64_t const channels = plan.view.channels;
    partials = passes.take<float2>(plan.tiles() * channels);
    if (request.dx && request.of_batch) {
      maps = {passes.take<float4>(channels), passes.take<float>(channels)};
      if (request.activation != Activation::kNone && !request.reads_saved())
        maps.offset = passes.take<float>(channels);
      if (maps.offset != nullptr && request.activation == Activation::kRelu &&
          request.dtype != DType::kFloat32)
        maps.threshold = passes.take<uint32_t>(channels);
    }
    exchange = on_chip.take<float4>(plan.on_chip ? plan.on_chip->exchange_values() : 0);
    bytes = std::max(passes.bytes(), on_chip.bytes());
  }
};

void launch_transform(TransformParams const& params, cudaStream_t stream) {
  (uses_columns(params.view) ? columns::launch_transform : planes::launch_transform)(params,
                                                                                     stream);
}

// dgamma, dbeta, the maps of dx, and dv where it is given.
void launch_reduction(Plan const& plan, GradientSource const& source, void* dv,
                      GradientFinalizeParams finalize, BackwardWorkspace const& workspace,
                      cudaStream_t stream) {
  GradientSumsParams const sums{source, dv, plan.rows_per_tile, workspace.partials};
  (uses_columns(plan.view) ? columns::launch_gradient_sums : planes::launch_gradient_sums)(sums,
                                                                                           stream);
  finalize.partials = workspace.partials;
  finalize.tiles = plan.tiles();
  finalize.maps = workspace.maps;
  finalize.x_dtype = plan.dtype;
  if (source.x == nullptr) finalize.stats = nullptr;
  launch_gradient_finalize(finalize, stream);
}

// dx = dv * gain in eval. Without an activation dy is dv.
void launch_scale(GradientSource const& dv, void* dx, cudaStream_t stream) {
  TransformParams transform;
  transform.x = dv.dy;
  transform.y = dx;
  transform.dtype = dv.dtype;
  transform.view = dv.view;
  transform.layer.running_var = dv.layer.running_var;
  transform.layer.eps = dv.layer.eps;
  transform.layer.gamma = dv.layer.gamma;
  launch_transform(transform, stream);
}

}  // namespace

Plan plan_forward(ChannelView const& view, DType dtype, bool aligned, bool with_residual) {
  bool const on_chip = aligned && !with_residual;
  Plan plan{view, dtype, on_chip ? plan_on_chip(view, dtype, false) : std::nullopt,
            choose_rows_per_tile(view, dtype)};
  plan.workspace_bytes = ForwardWorkspace(plan, nullptr).bytes;
  return plan;
}

void launch_forward(Plan const& plan, ForwardParams const& p, void* memory, cudaStream_t stream) {
  ForwardWorkspace const workspace(plan, memory);
  FinalizeParams finalize = p.finalize;
  finalize.channels = plan.view.channels;
  finalize.rows = plan.view.rows();
  if (plan.on_chip && on_chip::launch_forward({p.x, p.y, plan.dtype, p.gamma, p.beta, p.activation,
                                               finalize, workspace.exchange},
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
  TransformParams transform{p.x, p.residual, p.y, plan.dtype, plan.view, finalize.stats, {}};
  transform.layer.gamma = p.gamma;
  transform.layer.beta = p.beta;
  transform.layer.activation = p.activation;
  launch_transform(transform, stream);
}

void launch_inference(TransformParams const& params, cudaStream_t stream) {
  launch_transform(params, stream);
}

Plan plan_backward(BackwardRequest const& r) {
  bool const on_chip = r.dx && r.of_batch && r.aligned;
  Plan plan{r.view, r.dtype, on_chip ? plan_on_chip(r.view, r.dtype, true) : std::nullopt,
            choose_gradient_rows_per_tile(r.view, r.dtype, r.reads_x() || r.reads_saved())};
  plan.workspace_bytes = BackwardWorkspace(plan, r, nullptr).bytes;
  return plan;
}

void launch_backward(Plan const& plan, BackwardRequest const& request, BackwardParams const& p,
                     void* memory, cudaStream_t stream) {
  if (!request.any()) return;
  BackwardWorkspace const workspace(plan, request, memory);
  GradientSource source;
  source.dy = p.dy;
  source.x = request.reads_x() ? p.x : nullptr;
  source.saved = request.reads_saved() ? p.saved : nullptr;
  source.dtype = source.dy_dtype = plan.dtype;
  source.view = plan.view;
  source.dy_row_stride = plan.view.outer_stride;
  source.stats = p.stats;
  source.layer = p.layer;
  source.layer.activation = request.activation;
  GradientFinalizeParams finalize;
  finalize.channels = plan.view.channels;
  finalize.rows = plan.view.rows();
  finalize.stats = p.stats;
  finalize.running_var = p.layer.running_var;
  finalize.eps = p.layer.eps;
  finalize.gamma = p.layer.gamma;
  finalize.beta = p.layer.beta;
  finalize.dgamma = p.dgamma;
  finalize.dbeta = p.dbeta;
  if (plan.on_chip &&
      on_chip::launch_backward({source, p.dresidual, p.dx, finalize, workspace.exchange},
                               *plan.on_chip, stream)) {
    return;
  }

  bool const columns = uses_columns(plan.view), with_maps = request.dx && request.of_batch;
  if (with_maps || request.dgamma || request.dbeta) {
    // dx is made of dv, which saves reading two tensors again: kept where dx will be, if nobody
    // asks for it.
    void* const dv = !request.reads_saved() ? nullptr : request.dresidual ? p.dresidual : p.dx;
    launch_reduction(plan, source, dv, finalize, workspace, stream);
    if (!request.dx) return;
    if (dv != nullptr) {
      source.dy = dv;
      source.saved = nullptr;
      source.layer.activation = Activation::kNone;
    }
    if (with_maps) {
      GradientTransformParams const transform{source, p.dx, plan.view.outer_stride, workspace.maps};
      return (columns ? columns::launch_gradient_transform : planes::launch_gradient_transform)(
          transform, stream);
    }
  }
  if (source.layer.activation == Activation::kNone) return launch_scale(source, p.dx, stream);
  GradientScaleParams const scale{source, p.dresidual, p.dx};
  (columns ? columns::launch_gradient_scale : planes::launch_gradient_scale)(scale, stream);
}

}  // namespace cutlass_bn::batch_norm
