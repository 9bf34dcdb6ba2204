// The kernel of resident.h, for the forward and the backward alike. What differs is the Pass:
//   kTensors            that are kept on chip
//   source(tensor), target()
//   Running             a lane's sums of a channel
//   Sums                those of a warp or a block
//   Map                 from a channel's values to its output
//   Inputs              a channel's parameters, for its end
//   centre(channel)     what the sums of a channel are taken around, if it is known before
//   start(...)          Running, given the first chunk of a warp
//   add(...)            a vector to Running
//   add_up(running)     over the lanes; lane 0 has the result, and all lanes where sums can cancel
//   sums(...)           Running, added up, to Sums
//   cancels(...)        whether Running was taken around so bad a centre that it has to be taken again, around again(sums)
//   merge(...)          Sums of the lanes of a warp; lane 0 has the result
//   partial(sums)       what a block tells the others; .w is not 0
//   finish(...)         from what the blocks tell to the Map; lane 0 has the result, and stores the channel's if it is told to
//   apply(...)          Map to a vector of each tensor, in place in the first
#pragma once

#include <cooperative_groups.h>

#include <cuda/ptx>

#include "batch_norm/resident.h"
#include "batch_norm/tiling.h"
#include "common/launch.cuh"
#include "common/packet.cuh"

namespace cutlass_bn::batch_norm {

inline constexpr int kLaneVectors = kResidentVectors / 32;
inline constexpr int kResidentThreads = (kResidentWarps + kMaxAhead + 1) * 32;
inline constexpr int kLanePartials = kMaxGroup / 32;

struct RingPosition {
  int slot = 0;
  uint32_t phase = 0;  // of the slot's barrier

  __device__ __forceinline__ void advance(int slots) {
    if (++slot == slots) slot = 0, phase ^= 1;
  }
};

__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t phase) {
  constexpr uint32_t kSleep = 1000000;  // ns at most; a warp that looks again and again takes issue slots from those that work
  while (!cuda::ptx::mbarrier_try_wait_parity(barrier, phase, kSleep)) {
  }
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  cuda::ptx::mbarrier_arrive(cuda::ptx::sem_release, cuda::ptx::scope_cta, cuda::ptx::space_shared, barrier);
}

// A partial travels as one access of 16 bytes: who sees that .w is not 0 sees all of it, without a second round trip to memory.
__device__ __forceinline__ void tell(float4* to, float4 const& v) {
  asm volatile(
      "{\n"
      ".reg .b64 low, high;\n"
      ".reg .b128 all;\n"
      "mov.b64 low, {%1, %2};\n"
      "mov.b64 high, {%3, %4};\n"
      "mov.b128 all, {low, high};\n"
      "st.relaxed.gpu.global.b128 [%0], all;\n"
      "}\n" ::"l"(to),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
      : "memory");
}

__device__ __forceinline__ float4 look(float4 const* from) {
  float4 v;
  asm volatile(
      "{\n"
      ".reg .b64 low, high;\n"
      ".reg .b128 all;\n"
      "ld.relaxed.gpu.global.b128 all, [%4];\n"
      "mov.b128 {low, high}, all;\n"
      "mov.b64 {%0, %1}, low;\n"
      "mov.b64 {%2, %3}, high;\n"
      "}\n"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "l"(from)
      : "memory");
  return v;
}

// What `count` blocks have told, block b's in lane b % 32. Where there is none, .w is 0.
struct Told {
  float4 partial[kLanePartials];

  __device__ __forceinline__ void collect(float4 const* from, int count, int lane) {
    bool all;
    do {
      all = true;
#pragma unroll
      for (int i = 0; i < kLanePartials; ++i) {
        partial[i] = lane + 32 * i < count ? look(from + lane + 32 * i) : float4{};
      }
#pragma unroll
      for (int i = 0; i < kLanePartials; ++i) all = all && (lane + 32 * i >= count || partial[i].w != 0.f);
    } while (!__all_sync(0xffffffffu, all));
  }
};

// A place in the sequence of a warp's chunks of a channel.
struct ChunkCursor {
  int channel, chunk, piece;
  int64_t offset;  // elements

  __device__ __forceinline__ int vectors(ResidentPlan const& p) const {
    return piece == p.pieces - 1 ? p.last_piece_vectors : p.piece_vectors;
  }
};

template <int V>
struct ChunkWalk {
  ResidentPlan const& p;
  int worker, workers;  // this warp of so many that share a channel
  int first_piece, piece_step;
  int64_t first_offset, offset_step, wrap;

  __device__ __forceinline__ ChunkWalk(ResidentPlan const& plan, int worker, int workers)
      : p(plan), worker(worker), workers(workers) {
    int const plane = worker / p.pieces, plane_step = workers / p.pieces;
    int64_t const piece_elements = int64_t(p.piece_vectors) * V;
    first_piece = worker - plane * p.pieces;
    piece_step = workers - plane_step * p.pieces;
    first_offset = plane * p.outer_stride + first_piece * piece_elements;
    offset_step = plane_step * p.outer_stride + piece_step * piece_elements;
    wrap = p.outer_stride - p.pieces * piece_elements;
  }

  __device__ __forceinline__ ChunkCursor begin(int channel) const {
    return {channel, worker, first_piece, first_offset + channel * p.inner};
  }

  __device__ __forceinline__ bool at_end(ChunkCursor const& c) const { return c.chunk >= p.chunks; }

  __device__ __forceinline__ void advance(ChunkCursor& c) const {
    c.chunk += workers, c.piece += piece_step, c.offset += offset_step;
    if (c.piece >= p.pieces) c.piece -= p.pieces, c.offset += wrap;
  }
};

// A warp's part of shared memory, and what it has asked for.
template <class T, class Pass>
struct ChunkRing {
  static constexpr int V = kVectorWidth<T>, kTensors = Pass::kTensors;

  Pass const& pass;
  ResidentPlan const& plan;
  ChunkWalk<V> const& walk;
  char* data;         // [slots, kTensors, piece_vectors] vectors
  uint64_t* arrived;  // [slots] barriers
  int lane;
  ChunkCursor next;  // to ask for
  int next_slot = 0, vacant, in_flight = 0;

  __device__ __forceinline__ char* slot(int index, int tensor) const {
    return data + (index * kTensors + tensor) * (plan.piece_vectors * 16);
  }

  // Asks for the chunks there is room for.
  __device__ __forceinline__ void ask() {
    namespace ptx = cuda::ptx;
    while (vacant > 0 && in_flight < plan.in_flight && next.channel < plan.channels && !walk.at_end(next)) {
      if (lane == 0) {
        int const bytes = next.vectors(plan) * 16;
        uint64_t* const barrier = arrived + next_slot;
        ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, barrier, bytes * kTensors);
#pragma unroll
        for (int t = 0; t < kTensors; ++t) {
          ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, slot(next_slot, t), pass.source(t) + next.offset, bytes,
                             barrier);
        }
      }
      if (++next_slot == plan.slots) next_slot = 0;
      --vacant, ++in_flight;
      walk.advance(next);
      if (walk.at_end(next)) next = walk.begin(next.channel + plan.groups);
    }
  }

  __device__ __forceinline__ void see(RingPosition const& at) {
    wait(arrived + at.slot, at.phase);
    --in_flight;
    ask();
  }

  // After read(), by all lanes.
  __device__ __forceinline__ void vacate() {
    __syncwarp();
    ++vacant;
    ask();
  }

  __device__ __forceinline__ void read(RingPosition const& at, int vectors, Packet<T, V> (&values)[kTensors][kLaneVectors]) const {
#pragma unroll
    for (int t = 0; t < kTensors; ++t) {
      auto const* const from = reinterpret_cast<Packet<T, V> const*>(slot(at.slot, t)) + lane;
#pragma unroll
      for (int u = 0; u < kLaneVectors; ++u) {
        if (lane + 32 * u < vectors) values[t][u] = from[32 * u];
      }
    }
  }
};

template <class T, class Pass>
struct ResidentShared {
  uint64_t arrived[kResidentWarps][kMaxSlots];
  uint64_t summed[kMaxAhead + 1], mapped[kMaxAhead + 1];
  typename Pass::Sums sums[kMaxAhead + 1][kResidentWarps];
  typename Pass::Map maps[kMaxAhead + 1];
};

// The warps that work on chunks.
template <class T, class Pass>
__device__ __forceinline__ void work_on_chunks(Pass const& pass, ResidentPlan const& plan, ResidentShared<T, Pass>& shared,
                                               ChunkRing<T, Pass>& ring, int first_channel, int warp) {
  constexpr int V = kVectorWidth<T>, kTensors = Pass::kTensors;
  ChunkWalk<V> const& walk = ring.walk;
  int const lane = ring.lane, depth = plan.ahead + 1;
  Packet<T, V> values[kTensors][kLaneVectors];
  RingPosition sum_at, map_at;            // in the ring
  RingPosition sum_channel, map_channel;  // among the channels under way
  int to_sum = first_channel;
  float centre = pass.centre(first_channel);

  auto const sum_next = [&] {
    typename Pass::Running running{};
    float const own_centre = centre;
    int vectors_seen = 0;
    if (to_sum + plan.groups < plan.channels) centre = pass.centre(to_sum + plan.groups);
    RingPosition const begin = sum_at;
    auto const add_chunk = [&](int vectors) {
#pragma unroll
      for (int u = 0; u < kLaneVectors; ++u) {
        if (lane + 32 * u < vectors) pass.add(running, values, u);
      }
    };
    for (ChunkCursor at = walk.begin(to_sum); !walk.at_end(at); walk.advance(at)) {
      int const vectors = at.vectors(plan);
      ring.see(sum_at);
      ring.read(sum_at, vectors, values);
      if (vectors_seen == 0) running = pass.start(own_centre, values, vectors);
      add_chunk(vectors);
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
        add_chunk(vectors);
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
      ring.vacate();
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

// A warp that finishes every (ahead + 1)th channel. The channels under way have one each, as it waits for the other blocks.
template <class T, class Pass>
__device__ __forceinline__ void finish_channels(Pass const& pass, ResidentPlan const& plan, ResidentShared<T, Pass>& shared,
                                                float4* exchange, int first_channel, int rank, int slot, int lane) {
  int const depth = plan.ahead + 1;
  uint32_t phase = 0;
  for (int channel = first_channel + slot * plan.groups; channel < plan.channels; channel += plan.groups * depth, phase ^= 1) {
    typename Pass::Inputs const inputs = pass.inputs(channel, rank == 0);
    wait(shared.summed + slot, phase);
    typename Pass::Sums sums = lane < kResidentWarps ? shared.sums[slot][lane] : typename Pass::Sums{};
    float4 const own = pass.partial(pass.merge(sums));
    Told told{};
    if (plan.group > 1) {
      float4* const of_channel = exchange + int64_t(channel) * plan.group;
      if (lane == 0) tell(of_channel + rank, own);
      told.collect(of_channel, plan.group, lane);
    } else if (lane == 0) {
      told.partial[0] = own;
    }
    typename Pass::Map const map = pass.finish(channel, rank == 0 && lane == 0, told, inputs);
    if (lane == 0) {
      shared.maps[slot] = map;
      arrive(shared.mapped + slot);
    }
  }
}

template <class T, class Pass>
__global__ void __launch_bounds__(kResidentThreads, 1)
    resident_kernel(__grid_constant__ Pass const pass, __grid_constant__ ResidentPlan const plan, float4* exchange) {
#if __CUDA_ARCH__ >= 900
  namespace ptx = cuda::ptx;
  extern __shared__ __align__(128) char chunks[];
  __shared__ ResidentShared<T, Pass> shared;
  // From lane 0: the compiler then knows that a warp's numbers are the same in all its lanes.
  int const warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  int const first_channel = blockIdx.x / plan.group, rank = blockIdx.x - first_channel * plan.group;
  bool const on_chunks = warp < kResidentWarps;

  if (on_chunks && lane == 0) {
    for (int i = 0; i < plan.slots; ++i) ptx::mbarrier_init(shared.arrived[warp] + i, 1);
  } else if (lane == 0) {
    ptx::mbarrier_init(shared.summed + (warp - kResidentWarps), kResidentWarps);
    ptx::mbarrier_init(shared.mapped + (warp - kResidentWarps), 1);
  }
  ptx::fence_proxy_async(ptx::space_shared);
  __syncthreads();
  wait_for_previous_kernel();
  allow_next_kernel();

  ChunkWalk<kVectorWidth<T>> const walk(plan, rank * kResidentWarps + warp, plan.group * kResidentWarps);
  ChunkRing<T, Pass> ring{pass,
                          plan,
                          walk,
                          chunks + int64_t(warp) * plan.slots * Pass::kTensors * plan.piece_vectors * 16,
                          shared.arrived[on_chunks ? warp : 0],
                          lane,
                          walk.begin(first_channel),
                          0,
                          plan.slots};
  if (on_chunks) ring.ask();
  if (plan.group > 1) {  // nothing is told yet
    int64_t const count = int64_t(plan.channels) * plan.group;
    for (int64_t i = int64_t(blockIdx.x) * kResidentThreads + threadIdx.x; i < count; i += int64_t(gridDim.x) * kResidentThreads) {
      exchange[i] = {};
    }
    cooperative_groups::this_grid().sync();
  }
  if (on_chunks) {
    work_on_chunks(pass, plan, shared, ring, first_channel, warp);
  } else if (warp - kResidentWarps <= plan.ahead) {
    finish_channels(pass, plan, shared, exchange, first_channel, rank, warp - kResidentWarps, lane);
  }
#endif
}

// exchange: plan.exchange_bytes(), not initialised. False, and nothing launched, as of launch_cooperative_kernel.
template <class T, class Pass>
bool launch_resident(Pass const& pass, ResidentPlan const& plan, float4* exchange, cudaStream_t stream) {
  static_assert(sizeof(ResidentShared<T, Pass>) <= kStaticBytes);
  int const bytes = kResidentWarps * plan.slots * Pass::kTensors * plan.piece_vectors * 16;
  auto* const kernel = resident_kernel<T, Pass>;
  // Of any plan, as it holds for all launches, those of other threads and of captured graphs among them.
  CUTLASS_BN_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device_info().shared_bytes - kStaticBytes));
  dim3 const grid(static_cast<unsigned>(plan.group * plan.groups)), block(kResidentThreads);
  if (plan.group > 1) return launch_cooperative_kernel(kernel, grid, block, bytes, stream, pass, plan, exchange);
  launch_kernel(kernel, grid, block, bytes, stream, pass, plan, exchange);
  return true;
}

}  // namespace cutlass_bn::batch_norm
