#include <algorithm>
#include <limits>

#include "batch_norm/on_chip/plan.h"
#include "batch_norm/tiling.h"
#include "common/device_info.h"

namespace cutlass_bn::batch_norm {
namespace {

constexpr int64_t kRoundBytes = 16 << 10;  // what a channel costs a block beside its chunks, as
                                           // bytes of one tensor
constexpr int32_t kChunksInFlight = 2;     // more would only wait, and the exchanges behind them

}  // namespace

std::optional<OnChipPlan> plan_on_chip(ChannelView const& view, DType dtype, bool backward) {
  DeviceInfo const& device = device_info();
  int64_t const V = 16 / static_cast<int64_t>(size_of(dtype)), tensors = backward ? 2 : 1;
  if (view.outer == 0 || view.channels == 0) return std::nullopt;
  if (!device.has_sm90_code || uses_columns(view) || !is_vectorizable(view, static_cast<int>(V)))
    return std::nullopt;

  OnChipPlan p;
  int64_t const plane_vectors = view.inner / V, pieces = ceil_div(plane_vectors, kOnChipVectors);
  int64_t const piece_vectors = ceil_div(plane_vectors, pieces), chunks = view.outer * pieces;
  int64_t const slot_bytes = piece_vectors * 16 * tensors;
  int64_t const room = (device.shared_bytes - kStaticBytes) / (kOnChipWarps * slot_bytes);
  if (chunks > std::numeric_limits<int32_t>::max() ||
      view.channels > std::numeric_limits<int32_t>::max())
    return std::nullopt;
  p.inner = view.inner, p.outer_stride = view.outer_stride;
  p.channels = static_cast<int32_t>(view.channels);
  p.pieces = static_cast<int32_t>(pieces);
  p.piece_vectors = static_cast<int32_t>(piece_vectors);
  p.last_piece_vectors = static_cast<int32_t>(plane_vectors - (pieces - 1) * piece_vectors);
  p.chunks = static_cast<int32_t>(chunks);
  p.slots = static_cast<int32_t>(std::min<int64_t>(kMaxSlots, room));
  p.in_flight = kChunksInFlight;

  // The fewest blocks a group for each number of chunks a warp, two channels of which fit.
  int64_t best = std::numeric_limits<int64_t>::max();
  for (int32_t per_warp = 1; 2 * per_warp <= p.slots; ++per_warp) {
    int64_t const group = ceil_div(chunks, kOnChipWarps * per_warp);
    if (group > std::min(device.sm_count, kMaxGroup)) continue;
    int64_t const groups = std::min(device.sm_count / group, view.channels);
    int64_t const cost = ceil_div(view.channels, groups) *
                         (per_warp * kOnChipWarps * piece_vectors * 16 + kRoundBytes);
    if (cost >= best) continue;
    best = cost;
    p.group = static_cast<int32_t>(group), p.groups = static_cast<int32_t>(groups);
    p.per_warp = per_warp;
    p.ahead = std::min(kMaxAhead, p.slots / per_warp - 1);
  }
  if (best == std::numeric_limits<int64_t>::max()) return std::nullopt;
  return p;
}

}  // namespace cutlass_bn::batch_norm
