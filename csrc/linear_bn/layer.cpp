#include "linear_bn/layer.h"

#include "batch_norm/kernels.h"
#include "common/workspace.h"
#include "linear_bn/normalize.h"

namespace cutlass_bn::linear_bn {
namespace {

using batch_norm::ChannelView;

struct TrainingWorkspace {
  batch_norm::TileMomentsOut moments;
  void* split;
  int64_t bytes;

  TrainingWorkspace(TrainingPlan const& plan, void* memory) {
    Workspace pieces(memory);
    int64_t const values = plan.tiles() * plan.n;
    moments.partials = pieces.take<float2>(values);
    // The GEMMs' epilogues report rounded means alone.
    if (plan.product.path == Path::kPortable) moments.remainders = pieces.take<float>(values);
    split = pieces.take<char>(
        plan.product.path == Path::kSplit ? split_workspace_bytes(plan.product.split) : 0);
    bytes = pieces.bytes();
  }
};

// Whether a backward depends on u: the gradient of beta alone does so through an activation only.
bool reads_u(BackwardParams const& p) {
  return p.du != nullptr || p.dscale || p.dgamma || p.layer.activation != Activation::kNone;
}

struct BackwardWorkspace {
  ChannelView view;
  int64_t rows_per_tile, tiles;
  float2* partials;
  batch_norm::GradientMaps maps;
  int64_t bytes;

  BackwardWorkspace(BackwardParams const& p, void* memory) {
    bool const with_u = reads_u(p);
    Workspace pieces(memory);
    view = {p.m, p.n, 1, with_u ? p.u_row_stride : p.dy_row_stride};
    rows_per_tile = batch_norm::choose_gradient_rows_per_tile(view, with_u ? p.dtype : p.dy_dtype,
                                                              with_u);
    tiles = ceil_div(p.m, rows_per_tile);
    partials = pieces.take<float2>(tiles * p.n);
    if (p.du != nullptr)
      maps = {pieces.take<float4>(p.n), pieces.take<float>(p.n), pieces.take<float>(p.n),
              pieces.take<uint32_t>(p.n)};
    if (p.layer.activation != Activation::kRelu || p.dtype == DType::kFloat32)
      maps.threshold = nullptr;
    bytes = pieces.bytes();
  }
};

}  // namespace

TrainingPlan plan_training(Request const& request) {
  TrainingPlan plan{choose_plan(request), request.x.rows, request.w.rows, request.dtype};
  bool const portable = plan.product.path == Path::kPortable;
  plan.rows_per_tile = portable ? batch_norm::choose_rows_per_tile(
                                      {plan.m, plan.n, 1, request.out_row_stride}, plan.dtype)
                                : gemm::shape_of(plan.product.tile).m;
  plan.workspace_bytes = TrainingWorkspace(plan, nullptr).bytes;
  return plan;
}

void launch_training(TrainingPlan const& plan, TrainingParams const& p, void* memory,
                     Product const& product, cudaStream_t stream) {
  TrainingWorkspace const workspace(plan, memory);
  if (plan.product.path == Path::kPortable) {
    product();
    ChannelView const view{plan.m, plan.n, 1, p.ldu};
    batch_norm::columns::launch_stats(
        {p.u, plan.dtype, view, plan.rows_per_tile, workspace.moments}, stream);
  } else {
    gemm::MomentsParams moments;
    moments.operands = plan.product.operands;
    moments.u = p.u;
    moments.ldu = p.ldu;
    if (takes_bias(plan.dtype)) moments.bias = p.bias;
    moments.partials = workspace.moments.partials;
    moments.tile = plan.product.tile;
    if (plan.product.path == Path::kSplit) {
      launch_split_moments(plan.product.split, moments, workspace.split, stream);
    } else {
      gemm::launch_moments(moments, stream);
    }
  }
  FinalizeParams finalize = p.finalize;
  finalize.partials = workspace.moments.partials;
  finalize.remainders = workspace.moments.remainders;
  finalize.tiles = plan.tiles();
  finalize.channels = plan.n;
  finalize.rows = plan.m;
  finalize.rows_per_tile = plan.rows_per_tile;
  if (!takes_bias(plan.dtype)) finalize.bias = p.bias;
  launch_finalize(finalize, stream);
  if (p.y == nullptr) return;
  NormalizeParams normalize{p.u,    p.y,        p.ldu,     p.ldy,          plan.m,
                            plan.n, plan.dtype, p.y_dtype, finalize.stats, {}};
  normalize.layer.scale = finalize.scale;
  normalize.layer.gamma = p.gamma;
  normalize.layer.beta = p.beta;
  normalize.layer.activation = p.activation;
  launch_normalize(normalize, stream);
}

InferencePlan plan_inference(Request const& request) {
  InferencePlan plan{choose_plan(request), request.x.rows, request.w.rows, request.dtype,
                     request.out_dtype};
  if (plan.product.path == Path::kSplit)
    plan.workspace_bytes = split_workspace_bytes(plan.product.split);
  return plan;
}

void launch_inference(InferencePlan const& plan, InferenceParams const& p, void* workspace,
                      Product const& product, cudaStream_t stream) {
  if (plan.product.path == Path::kPortable) {
    product();
    NormalizeParams normalize{p.u,    p.y,        p.ldu,        p.ldy,   plan.m,
                              plan.n, plan.dtype, plan.y_dtype, nullptr, p.layer};
    if (takes_bias(plan.dtype)) normalize.layer.bias = {};
    return launch_normalize(normalize, stream);
  }
  gemm::InferenceParams const fused{plan.product.operands, p.y,     p.ldy,
                                    plan.y_dtype,          p.layer, plan.product.tile};
  if (plan.product.path == Path::kSplit)
    return launch_split_inference(plan.product.split, fused, workspace, stream);
  gemm::launch_inference(fused, stream);
}

int64_t backward_workspace_bytes(BackwardParams const& params) {
  return BackwardWorkspace(params, nullptr).bytes;
}

void launch_backward(BackwardParams const& p, void* memory, cudaStream_t stream) {
  BackwardWorkspace const workspace(p, memory);
  bool const with_u = reads_u(p);
  batch_norm::GradientSource source;
  source.dy = p.dy;
  source.dtype = source.dy_dtype = p.dy_dtype;
  source.view = workspace.view;
  source.dy_row_stride = p.dy_row_stride;
  if (with_u) {
    source.x = p.u;
    source.dtype = p.dtype;
    source.stats = p.stats;
    source.layer = p.layer;
  }
  batch_norm::columns::launch_gradient_sums(
      {source, nullptr, workspace.rows_per_tile, workspace.partials}, stream);

  batch_norm::GradientFinalizeParams finalize;
  finalize.partials = workspace.partials;
  finalize.tiles = workspace.tiles;
  finalize.channels = p.n;
  finalize.rows = p.m;
  finalize.stats = with_u ? p.stats : nullptr;
  finalize.eps = p.layer.eps;
  finalize.scale = p.layer.scale;
  finalize.gamma = p.layer.gamma;
  finalize.beta = p.layer.beta;
  finalize.dshift = p.dbias;
  finalize.dscale = p.dscale;
  finalize.dgamma = p.dgamma;
  finalize.dbeta = p.dbeta;
  finalize.maps = workspace.maps;
  finalize.x_dtype = p.dtype;
  batch_norm::launch_gradient_finalize(finalize, stream);
  if (p.du != nullptr)
    batch_norm::columns::launch_gradient_transform({source, p.du, p.du_row_stride, workspace.maps},
                                                   stream);
}

}  // namespace cutlass_bn::linear_bn
