// Channels kept on chip between the passes, so that x, and dy in the backward, are read from memory
// once. NCHW.
//
// A plane is cut into pieces of up to kOnChipVectors vectors. A channel's pieces, its chunks, are
// dealt to the warps of a group of blocks. A warp has room for some chunks in shared memory and
// asks for the next ones as soon as it has room. It sums the chunks of a channel when they arrive,
// and maps them to the output when the group has exchanged its sums, through memory. Meanwhile it
// sums those of the next channels: an exchange takes several us where memory is busy.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <optional>

#include "batch_norm/params.h"

namespace cutlass_bn::batch_norm {

inline constexpr int kOnChipVectors = 128;  // of a chunk, at most: four a lane
inline constexpr int kOnChipWarps = 16;     // that work on chunks
inline constexpr int kMaxSlots = 32;        // chunks that a warp has room for, at most
inline constexpr int kMaxAhead = 2;  // channels that are summed before the first of them is mapped,
                                     // at most
inline constexpr int kMaxGroup = 160;         // blocks that share a channel, at most
inline constexpr int kStaticBytes = 8 << 10;  // of shared memory, for all but chunks

struct OnChipPlan {
  int64_t inner = 0, outer_stride = 0;  // elements
  int32_t channels = 0;
  int32_t pieces = 1;  // of a plane
  int32_t piece_vectors = 0, last_piece_vectors = 0;
  int32_t chunks = 0;     // of a channel: outer * pieces
  int32_t per_warp = 1;   // of these, a warp has so many or one less
  int32_t group = 1;      // blocks that share a channel
  int32_t groups = 1;     // channels that are worked on at a time
  int32_t slots = 0;      // chunks that a warp has room for
  int32_t ahead = 1;      // channels that are summed before the first of them is mapped
  int32_t in_flight = 1;  // chunks that a warp has asked for and not seen yet, at most

  // What the blocks publish, in float4.
  int64_t exchange_values() const { return group > 1 ? int64_t(channels) * group : 0; }
};

// For the forward, which keeps x, or the backward, which keeps dy and x. None where there is
// nothing to do, the channels don't fit on chip, rows can't be copied in bulk (addresses must be
// multiples of 16 bytes too, which is for the caller to see to), or the GPU's code has no bulk
// copies. Depends on nothing but its arguments and the device, of which it takes all
// multiprocessors to be there: in a context that is restricted to some of them (a green context)
// the launchers can refuse it.
std::optional<OnChipPlan> plan_on_chip(ChannelView const& view, DType dtype, bool backward);

}  // namespace cutlass_bn::batch_norm
