// A warp's ring of chunks in shared memory, filled by bulk copies.
#pragma once

#include <cuda/ptx>

#include "batch_norm/on_chip/plan.h"
#include "common/packet.cuh"

namespace cutlass_bn::batch_norm {

inline constexpr int kLaneVectors = kOnChipVectors / 32;

struct RingPosition {
  int slot = 0;
  uint32_t phase = 0;  // of the slot's barrier

  __device__ __forceinline__ void advance(int slots) {
    if (++slot == slots) slot = 0, phase ^= 1;
  }
};

__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t phase) {
  constexpr uint32_t kSleep = 1000000;  // ns at most; a warp that looks again and again takes issue
                                        // slots from those that work
  while (!cuda::ptx::mbarrier_try_wait_parity(barrier, phase, kSleep)) {
  }
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  cuda::ptx::mbarrier_arrive(cuda::ptx::sem_release, cuda::ptx::scope_cta, cuda::ptx::space_shared,
                             barrier);
}

// Into L2, for loads that follow soon; a multiple of 16 bytes.
__device__ __forceinline__ void prefetch(void const* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// A place in the sequence of a warp's chunks of a channel.
struct ChunkCursor {
  int channel, chunk, piece;
  int64_t offset;  // elements

  __device__ __forceinline__ int vectors(OnChipPlan const& p) const {
    return piece == p.pieces - 1 ? p.last_piece_vectors : p.piece_vectors;
  }
};

template <int V>
struct ChunkWalk {
  OnChipPlan const& p;
  int worker, workers;  // this warp of so many that share a channel
  int first_piece, piece_step;
  int64_t first_offset, offset_step, wrap;

  __device__ __forceinline__ ChunkWalk(OnChipPlan const& plan, int worker, int workers)
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

// A warp's part of shared memory: it is the producer and the consumer of its chunks.
template <class T, class Pass>
struct ChunkRing {
  static constexpr int V = kVectorWidth<T>, kTensors = Pass::kTensors;

  Pass const& pass;
  OnChipPlan const& plan;
  ChunkWalk<V> const& walk;
  char* data;         // [slots, kTensors, piece_vectors] vectors
  uint64_t* arrived;  // [slots] barriers
  int lane;
  ChunkCursor next;  // to copy
  int next_slot = 0, free_slots, in_flight = 0;

  __device__ __forceinline__ char* slot(int index, int tensor) const {
    return data + (index * kTensors + tensor) * (plan.piece_vectors * 16);
  }

  // Issues the copies of the chunks that there is room for.
  __device__ __forceinline__ void produce() {
    namespace ptx = cuda::ptx;
    while (free_slots > 0 && in_flight < plan.in_flight && next.channel < plan.channels &&
           !walk.at_end(next)) {
      if (lane == 0) {
        int const bytes = next.vectors(plan) * 16;
        uint64_t* const barrier = arrived + next_slot;
        ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, barrier,
                                       bytes * kTensors);
#pragma unroll
        for (int t = 0; t < kTensors; ++t) {
          ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, slot(next_slot, t),
                             pass.source(t) + next.offset, bytes, barrier);
        }
        if constexpr (Pass::kReadsBeside) prefetch(pass.beside() + next.offset, bytes);
      }
      if (++next_slot == plan.slots) next_slot = 0;
      --free_slots, ++in_flight;
      walk.advance(next);
      if (walk.at_end(next)) next = walk.begin(next.channel + plan.groups);
    }
  }

  __device__ __forceinline__ void consumer_wait(RingPosition const& at) {
    wait(arrived + at.slot, at.phase);
    --in_flight;
    produce();
  }

  // After the last read(), by all lanes.
  __device__ __forceinline__ void consumer_release() {
    if constexpr (Pass::kWritesBack) cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
    __syncwarp();
    ++free_slots;
    produce();
  }

  __device__ __forceinline__ void read(RingPosition const& at, int vectors,
                                       Packet<T, V> (&values)[kTensors][kLaneVectors]) const {
#pragma unroll
    for (int t = 0; t < kTensors; ++t) {
      auto const* const from = reinterpret_cast<Packet<T, V> const*>(slot(at.slot, t)) + lane;
#pragma unroll
      for (int u = 0; u < kLaneVectors; ++u) {
        if (lane + 32 * u < vectors) values[t][u] = from[32 * u];
      }
    }
  }

  // Vector lane + 32 * u of the first tensor, for the same lane to read.
  __device__ __forceinline__ void write(RingPosition const& at, int u,
                                        Packet<T, V> const& value) const {
    reinterpret_cast<Packet<T, V>*>(slot(at.slot, 0))[lane + 32 * u] = value;
  }
};

}  // namespace cutlass_bn::batch_norm
