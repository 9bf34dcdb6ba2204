// The kernel of plan.h, for the forward and the backward alike. What differs is the Pass:
//
//   kTensors          that are kept on chip
//   source(tensor), target()
//   kReadsBeside      whether a further tensor, beside(), is read past shared memory when a channel
//                     is summed
//   kWritesBack       whether add() changes the vector of the first tensor
//   Running           a lane's sums of a channel
//   Sums              those of a warp or a block
//   Map               from a channel's values to its output
//   Inputs            a channel's parameters, for its end
//   Centre            what the sums of a channel are taken around, if it is known before
//   centre(channel)
//   start(...)        Running, given the first chunk of a warp
//   add(...)          a vector to Running, given that of beside()
//   added(...)        stores what add() made of the vector
//   add_up(running)   over the lanes; lane 0 has the result, and all lanes where sums can cancel
//   sums(...)         Running, added up, to Sums
//   cancels(...)      whether Running has to be taken again, around again(sums)
//   merge(...)        Sums of the lanes of a warp; lane 0 has the result
//   partial(sums)     what a block publishes; .w is not 0
//   finish(...)       from what the blocks published to the Map, in lane 0; stores the channel's
//                     results if it is told to
//   apply(...)        Map to a vector of each tensor, in place in the first
#pragma once

#include <cooperative_groups.h>

#include "batch_norm/on_chip/chunk_ring.cuh"
#include "batch_norm/on_chip/exchange.cuh"
#include "batch_norm/on_chip/plan.h"
#include "batch_norm/tiling.h"
#include "common/launch.cuh"
#include "common/packet.cuh"

namespace cutlass_bn::batch_norm {

inline constexpr int kOnChipThreads = (kOnChipWarps + kMaxAhead + 1) * 32;

template <class T, class Pass>
struct OnChipShared {
  uint64_t arrived[kOnChipWarps][kMaxSlots];
  uint64_t summed[kMaxAhead + 1], mapped[kMaxAhead + 1];
  typename Pass::Sums sums[kMaxAhead + 1][kOnChipWarps];
  typename Pass::Map maps[kMaxAhead + 1];
};

// The warps that work on chunks.
template <class T, class Pass>
__device__ __forceinline__ void consume_chunks(Pass const& pass, OnChipPlan const& plan,
                                               OnChipShared<T, Pass>& shared,
                                               ChunkRing<T, Pass>& ring, int first_channel,
                                               int warp) {
  constexpr int V = kVectorWidth<T>, kTensors = Pass::kTensors;
  ChunkWalk<V> const& walk = ring.walk;
  int const lane = ring.lane, depth = plan.ahead + 1;
  Packet<T, V> values[kTensors][kLaneVectors], beside[kLaneVectors];
  RingPosition sum_at, map_at;            // in the ring
  RingPosition sum_channel, map_channel;  // among the channels under way
  int to_sum = first_channel;
  typename Pass::Centre centre = pass.centre(first_channel);

  auto const load_beside = [&](ChunkCursor const& at) {
    if constexpr (Pass::kReadsBeside) {
      T const* const from = pass.beside() + at.offset + lane * V;
      int const vectors = at.vectors(plan);
#pragma unroll
      for (int u = 0; u < kLaneVectors; ++u) {
        if (lane + 32 * u < vectors) beside[u].load(from + 32 * u * V);
      }
    }
  };

  auto const sum_next = [&] {
    typename Pass::Running running{};
    typename Pass::Centre const own_centre = centre;
    int vectors_seen = 0;
    if (to_sum + plan.groups < plan.channels) centre = pass.centre(to_sum + plan.groups);
    RingPosition const begin = sum_at;
    auto const add_chunk = [&](ChunkCursor const& at, int vectors) {
#pragma unroll
      for (int u = 0; u < kLaneVectors; ++u) {
        if (lane + 32 * u >= vectors) continue;
        pass.add(running, values, u, beside[u]);
        if constexpr (Pass::kWritesBack) {
          ring.write(sum_at, u, values[0][u]);
          pass.added(values[0][u], at.offset + (lane + 32 * u) * V);
        }
      }
    };
    for (ChunkCursor at = walk.begin(to_sum); !walk.at_end(at); walk.advance(at)) {
      int const vectors = at.vectors(plan);
      load_beside(at);
      ring.consumer_wait(sum_at);
      ring.read(sum_at, vectors, values);
      if (vectors_seen == 0) running = pass.start(own_centre, values, vectors);
      add_chunk(at, vectors);
      vectors_seen += vectors;
      sum_at.advance(plan.slots);
    }
    pass.add_up(running);
    typename Pass::Sums sums = pass.sums(running, vectors_seen * V);
    if (pass.cancels(running, sums)) {  // rare, and the chunks are all here
      running = pass.again(sums);
      sum_at = begin;
      for (ChunkCursor at = walk.begin(to_sum); !walk.at_end(at); walk.advance(at)) {
        int const vectors = at.vectors(plan);
        ring.read(sum_at, vectors, values);
        add_chunk(at, vectors);
        sum_at.advance(plan.slots);
      }
      pass.add_up(running);
      sums = pass.sums(running, vectors_seen * V);
    }
    if (lane == 0) {
      shared.sums[sum_channel.slot][warp] = sums;
      arrive(shared.summed + sum_channel.slot);
    }
    sum_channel.advance(depth);
    to_sum += plan.groups;
  };

  for (int i = 0; i < plan.ahead && to_sum < plan.channels; ++i) sum_next();
  for (int channel = first_channel; channel < plan.channels; channel += plan.groups) {
    if (to_sum < plan.channels) sum_next();
    wait(shared.mapped + map_channel.slot, map_channel.phase);
    typename Pass::Map const map = shared.maps[map_channel.slot];
    map_channel.advance(depth);
    for (ChunkCursor at = walk.begin(channel); !walk.at_end(at); walk.advance(at)) {
      int const vectors = at.vectors(plan);
      ring.read(map_at, vectors, values);
      ring.consumer_release();
      T* const to = pass.target() + at.offset + lane * V;
#pragma unroll
      for (int u = 0; u < kLaneVectors; ++u) {
        if (lane + 32 * u < vectors) {
          pass.apply(map, values, u);
          values[0][u].store(to + 32 * u * V);
        }
      }
      map_at.advance(plan.slots);
    }
  }
}

// A warp that finishes every (ahead + 1)th channel. The channels under way have one each, as it
// waits for the other blocks.
template <class T, class Pass>
__device__ __forceinline__ void finish_channels(Pass const& pass, OnChipPlan const& plan,
                                                OnChipShared<T, Pass>& shared, float4* exchange,
                                                int first_channel, int rank, int slot, int lane) {
  int const depth = plan.ahead + 1;
  uint32_t phase = 0;
  for (int channel = first_channel + slot * plan.groups; channel < plan.channels;
       channel += plan.groups * depth, phase ^= 1) {
    typename Pass::Inputs const inputs = pass.inputs(channel, rank == 0);
    wait(shared.summed + slot, phase);
    typename Pass::Sums sums = lane < kOnChipWarps ? shared.sums[slot][lane]
                                                   : typename Pass::Sums{};
    float4 const own = pass.partial(pass.merge(sums));
    Published published{};
    if (plan.group > 1) {
      float4* const of_channel = exchange + int64_t(channel) * plan.group;
      if (lane == 0) publish(of_channel + rank, own);
      published.collect(of_channel, plan.group, lane);
    } else if (lane == 0) {
      published.partial[0] = own;
    }
    typename Pass::Map const map = pass.finish(channel, rank == 0 && lane == 0, published, inputs);
    if (lane == 0) {
      shared.maps[slot] = map;
      arrive(shared.mapped + slot);
    }
  }
}

template <class T, class Pass>
__global__ void __launch_bounds__(kOnChipThreads, 1)
    on_chip_kernel(__grid_constant__ Pass const pass, __grid_constant__ OnChipPlan const plan,
                   float4* exchange) {
#if __CUDA_ARCH__ >= 900
  namespace ptx = cuda::ptx;
  extern __shared__ __align__(128) char chunks[];
  __shared__ OnChipShared<T, Pass> shared;
  // From lane 0: the compiler then knows that a warp's numbers are the same in all its lanes.
  int const warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  int const first_channel = blockIdx.x / plan.group, rank = blockIdx.x - first_channel * plan.group;
  bool const on_chunks = warp < kOnChipWarps;

  if (on_chunks && lane == 0) {
    for (int i = 0; i < plan.slots; ++i) ptx::mbarrier_init(shared.arrived[warp] + i, 1);
  } else if (lane == 0) {
    ptx::mbarrier_init(shared.summed + (warp - kOnChipWarps), kOnChipWarps);
    ptx::mbarrier_init(shared.mapped + (warp - kOnChipWarps), 1);
  }
  ptx::fence_proxy_async(ptx::space_shared);
  __syncthreads();
  wait_for_previous_kernel();
  allow_next_kernel();

  ChunkWalk<kVectorWidth<T>> const walk(plan, rank * kOnChipWarps + warp,
                                        plan.group * kOnChipWarps);
  ChunkRing<T, Pass> ring{
      pass,
      plan,
      walk,
      chunks + int64_t(warp) * plan.slots * Pass::kTensors * plan.piece_vectors * 16,
      shared.arrived[on_chunks ? warp : 0],
      lane,
      walk.begin(first_channel),
      0,
      plan.slots};
  if (on_chunks) ring.produce();
  if (plan.group > 1) {  // nothing is published yet
    int64_t const count = int64_t(plan.channels) * plan.group;
    for (int64_t i = int64_t(blockIdx.x) * kOnChipThreads + threadIdx.x; i < count;
         i += int64_t(gridDim.x) * kOnChipThreads) {
      exchange[i] = {};
    }
    cooperative_groups::this_grid().sync();
  }
  if (on_chunks) {
    consume_chunks(pass, plan, shared, ring, first_channel, warp);
  } else if (warp - kOnChipWarps <= plan.ahead) {
    finish_channels(pass, plan, shared, exchange, first_channel, rank, warp - kOnChipWarps, lane);
  }
#endif
}

// exchange: plan.exchange_values(), not initialised. False, and nothing launched, as of
// launch_cooperative_kernel.
template <class T, class Pass>
bool launch(Pass const& pass, OnChipPlan const& plan, float4* exchange, cudaStream_t stream) {
  static_assert(sizeof(OnChipShared<T, Pass>) <= kStaticBytes);
  int const bytes = kOnChipWarps * plan.slots * Pass::kTensors * plan.piece_vectors * 16;
  auto* const kernel = on_chip_kernel<T, Pass>;
  static OncePerDevice once;
  once([kernel] {
    int const largest = device_info().shared_bytes - kStaticBytes;
    CUTLASS_BN_CUDA(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, largest));
  });
  dim3 const grid(static_cast<unsigned>(plan.group * plan.groups)), block(kOnChipThreads);
  if (plan.group > 1)
    return launch_cooperative_kernel(kernel, grid, block, bytes, stream, pass, plan, exchange);
  launch_kernel(kernel, grid, block, bytes, stream, pass, plan, exchange);
  return true;
}

}  // namespace cutlass_bn::batch_norm
