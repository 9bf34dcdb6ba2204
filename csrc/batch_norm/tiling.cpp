#include "batch_norm/tiling.h"

#include "common/check.h"
#include "common/device_info.h"

namespace cutlass_bn::batch_norm {
namespace {

// Tile length, in steps, where each of `lanes` blocks per tile walks `steps` steps in all. The unit
// of cost is half a step of one block (16 KB). A block costs its steps and half a step to start and
// end; at the end the machine drains for about half a block; and finalize_kernel walks all tiles of
// a channel.
int64_t choose_steps_per_tile(int64_t steps, int64_t lanes, int64_t max_steps, int64_t slots) {
  constexpr int kMaxWaves = 16;
  constexpr int kTilesPerUnit = 64;
  int64_t best = 1, best_cost = INT64_MAX;
  for (int waves = 1; waves <= kMaxWaves; ++waves) {
    int64_t const wanted = std::clamp<int64_t>(waves * slots / lanes, 1, steps);
    int64_t const length = std::min(ceil_div(steps, wanted), max_steps),
                  tiles = ceil_div(steps, length);
    int64_t const cost = ceil_div(tiles * lanes, slots) * (2 * length + 1) + length +
                         tiles / kTilesPerUnit;
    if (cost < best_cost) best = length, best_cost = cost;
  }
  return best;
}

BlockOrder block_order(int64_t tiles, int64_t lanes, int64_t bytes_per_tile, int blocks_per_sm) {
  CUTLASS_BN_CHECK(tiles * lanes <= INT32_MAX, "input: too many blocks of work (", tiles * lanes,
                   ")");
  int const slots = device_info().sm_count * blocks_per_sm;
  return {tiles, static_cast<uint32_t>(lanes), bytes_per_tile, kReusableBytes / slots, slots};
}

}  // namespace

PlaneTiling tile_planes(ChannelView const& view, int64_t rows_per_tile, int V, int row_bytes) {
  PlaneTiling t;
  t.vectors = view.outer * (view.inner / V);
  t.vectors_per_tile = static_cast<int32_t>(rows_per_tile / V);
  t.vectors_per_plane = view.inner / V;
  t.plane = FastDivisor(static_cast<uint32_t>(std::min(t.vectors_per_plane, kLongPlane)));
  t.inner = view.inner;
  t.outer_stride = view.outer_stride;
  t.order = block_order(ceil_div(t.vectors, t.vectors_per_tile), view.channels,
                        rows_per_tile * row_bytes, kPlaneBlocksPerSm);
  return t;
}

ColumnTiling tile_columns(ChannelView const& view, int64_t rows_per_tile, int V, int row_bytes) {
  ColumnTiling t;
  t.columns = view.channels * view.inner;
  t.rows = view.outer;
  t.rows_per_tile = static_cast<int32_t>(rows_per_tile / view.inner);
  t.block_vectors = column_block_vectors(view, V);
  t.block_rows = kThreads / t.block_vectors;
  t.block_channels = static_cast<int32_t>(t.block_vectors * V / view.inner);
  t.inner = view.inner;
  t.row_stride = view.outer_stride;
  int64_t const bytes_per_tile = int64_t(t.rows_per_tile) * t.block_vectors * V * row_bytes;
  t.order = block_order(ceil_div(t.rows, t.rows_per_tile),
                        ceil_div(view.channels, t.block_channels), bytes_per_tile,
                        column_blocks_per_sm(V));
  return t;
}

namespace {

// loads: vectors of each tensor that a thread has in flight.
int64_t choose_rows(ChannelView const& view, DType dtype, int loads) {
  int const width = 16 / static_cast<int>(size_of(dtype));
  int const V = is_vectorizable(view, width) ? width : 1;
  int const sm_count = device_info().sm_count;
  if (uses_columns(view)) {
    int64_t const vectors = column_block_vectors(view, V);
    int64_t const step = kThreads / vectors * loads;  // in outer indices
    int64_t const lanes = ceil_div(view.channels * view.inner, vectors * V);
    int64_t const max_steps = std::max<int64_t>(1, kMaxRowsPerTile / (step * view.inner));
    int64_t const slots = sm_count * column_blocks_per_sm(V);
    return choose_steps_per_tile(ceil_div(view.outer, step), lanes, max_steps, slots) * step *
           view.inner;
  }
  int64_t const step = int64_t(kThreads) * loads * V;
  int64_t const slots = sm_count * kPlaneBlocksPerSm;
  return choose_steps_per_tile(ceil_div(view.outer * view.inner, step), view.channels,
                               kMaxRowsPerTile / step, slots) *
         step;
}

}  // namespace

int64_t choose_rows_per_tile(ChannelView const& view, DType dtype) {
  return choose_rows(view, dtype, kUnroll);
}

int64_t choose_gradient_rows_per_tile(ChannelView const& view, DType dtype, bool with_others) {
  return choose_rows(view, dtype, with_others ? kGradientLoads<true> : kGradientLoads<false>);
}

}  // namespace cutlass_bn::batch_norm
