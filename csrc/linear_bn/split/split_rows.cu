// The split where a row's elements are adjacent: one read and one write, at the speed of memory.
// The elements wait in registers for the row's maximum. Of a row too long for that the last chunk
// does, and the others are read again, backwards, while L2 has them.
#include <algorithm>

#include "common/launch.cuh"
#include "common/packet.cuh"
#include "linear_bn/split/element.cuh"
#include "linear_bn/split/kernels.h"

namespace cutlass_bn::linear_bn {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;

// kRowThreads_ threads take a row and hold kElements_ elements of it each: all of it, or (kLong_) a
// chunk at a time. Short rows share a block.
template <int kRowThreads_, int kElements_, bool kLong_ = false>
struct Shape {
  static constexpr int kRowThreads = kRowThreads_, kElements = kElements_;
  static constexpr bool kLong = kLong_;
  static constexpr int kChunk = kRowThreads * kElements;
  static constexpr int kThreads = kRowThreads < 256 ? 256 : kRowThreads;
  static constexpr int kRows = kThreads / kRowThreads;
  static constexpr int kRowWarps = kRowThreads / 32;
  static constexpr int kBlocksPerSm = (kElements > 16 || kLong ? 1024 : 1536) / kThreads;
};

// A thread's part of a chunk: packets of two loads of kWidth elements. So 16-byte loads make
// 16-byte stores, and single elements, all that can be loaded where addresses aren't aligned, still
// make whole words.
template <class S, int kWidth>
struct Part {
  static constexpr int kColumns = 2 * kWidth;
  static constexpr int kPackets = S::kElements / kColumns;
  static constexpr int kStep = S::kRowThreads * kColumns;  // from packet to packet
  Packet<float, kWidth> x[kPackets][2];

  // left: elements of the chunk from p on.
  __device__ __forceinline__ void load(float const* p, int left) {
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const column = i * kStep + half * kWidth;
        x[i][half] = {};
        if (column < left) x[i][half].load(p + column);
      }
    }
  }

  __device__ __forceinline__ uint32_t largest_magnitude() const {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
        largest = max(largest, magnitude(x[i][j / kWidth].word[j % kWidth]));
    }
    return largest;
  }

  // left: as above, with the planes' padding. Returns the elements' census.
  __device__ __forceinline__ uint32_t split(RowScale const& row, SplitMatrix const& result,
                                            int64_t offset, int left) {
    if (row.zero) {
#pragma unroll
      for (int i = 0; i < kPackets; ++i) x[i][0] = x[i][1] = {};
    }
    uint32_t census = 0;
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      SplitPacket<kWidth> packet;
#pragma unroll
      for (int j = 0; j < kColumns; j += 2) {
        census = add_census(census, packet.set(j / 2, x[i][j / kWidth][j % kWidth],
                                               x[i][(j + 1) / kWidth][(j + 1) % kWidth], row));
      }
      if (i * kStep < left) packet.store(result, offset + i * kStep);
    }
    return census;
  }
};

template <class S, int kWidth>
__global__ void __launch_bounds__(S::kThreads, S::kBlocksPerSm)
    split_rows_kernel(__grid_constant__ SplitSource const source,
                      __grid_constant__ SplitMatrix const result) {
  __shared__ uint32_t largest_of_warp[S::kThreads / 32];
  __shared__ uint32_t census_of_warp[S::kThreads / 32];
  wait_for_previous_kernel();
  allow_next_kernel();
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int const row_warp = warp / S::kRowWarps * S::kRowWarps;  // the row's first
  int64_t const row = int64_t(blockIdx.x) * S::kRows + threadIdx.x / S::kRowThreads;
  int const first = threadIdx.x % S::kRowThreads * Part<S, kWidth>::kColumns;
  bool const valid = S::kRows == 1 || row < source.rows;
  int64_t const k = valid ? source.k : 0, ld = valid ? result.ld : 0;
  float const* const x = source.data + row * source.row_stride + first;
  int64_t const offset = row * result.ld + first;
  // From the thread's first element on, of a chunk that begins at `begin` of a row that ends at
  // `end`.
  auto const left = [first](int64_t end, int64_t begin) {
    return int(min(end - begin, int64_t(S::kChunk))) - first;
  };

  Part<S, kWidth> part;
  uint32_t largest = 0;
  int64_t begin = 0;  // of the chunk
#pragma unroll 1
  for (;; begin += S::kChunk) {
    part.load(x + begin, left(k, begin));
    largest = max(largest, part.largest_magnitude());
    if (!S::kLong || begin + S::kChunk >= k) break;
  }
  largest = __reduce_max_sync(kAllLanes, largest);
  if constexpr (S::kRowWarps > 1) {
    if (lane == 0) largest_of_warp[warp] = largest;
    __syncthreads();
    largest = __reduce_max_sync(kAllLanes, largest_of_warp[row_warp + lane % S::kRowWarps]);
  }

  RowScale const scale = row_scale(largest, k);
  uint32_t census = part.split(scale, result, offset + begin, left(ld, begin));
#pragma unroll 1
  while (S::kLong && begin > 0) {
    constexpr int kWhole = S::kChunk;  // only the last chunk can be less
    begin -= kWhole;
    part.load(x + begin, kWhole - first);
    census = add_census(census, part.split(scale, result, offset + begin, kWhole - first));
  }
  census = warp_census(census);
  if constexpr (S::kRowWarps > 1) {
    if (lane == 0) census_of_warp[warp] = census;
    __syncthreads();
    census = warp_census(lane < S::kRowWarps ? census_of_warp[row_warp + lane] : 0);
  }
  if (threadIdx.x % S::kRowThreads == 0 && valid) {
    result.exponents[row] = scale.exponent;
    result.census[row] = scale.zero ? scale.census : census;
  }
}

template <class S>
void launch(SplitSource const& source, SplitMatrix const& result, bool vectorized,
            cudaStream_t stream) {
  int64_t const blocks = (source.rows + S::kRows - 1) / S::kRows;
  CUTLASS_BN_CHECK(blocks <= INT32_MAX, "split: too many blocks of work (", blocks, ")");
  launch_kernel(vectorized ? split_rows_kernel<S, 4> : split_rows_kernel<S, 1>,
                dim3(static_cast<unsigned>(blocks)), dim3(S::kThreads), 0, stream, source, result);
}

}  // namespace

void launch_split_rows(SplitSource const& source, SplitMatrix const& result, bool vectorized,
                       cudaStream_t stream) {
  auto const run = [&](auto shape) { launch<decltype(shape)>(source, result, vectorized, stream); };
  if (source.k <= Shape<32, 16>::kChunk) return run(Shape<32, 16>());
  if (source.k <= Shape<64, 16>::kChunk) return run(Shape<64, 16>());
  if (source.k <= Shape<128, 16>::kChunk) return run(Shape<128, 16>());
  if (source.k <= Shape<256, 16>::kChunk) return run(Shape<256, 16>());
  if (source.k <= Shape<512, 16>::kChunk) return run(Shape<512, 16>());
  if (source.k <= Shape<512, 32>::kChunk) return run(Shape<512, 32>());
  run(Shape<512, 16, true>());
}

}  // namespace cutlass_bn::linear_bn
