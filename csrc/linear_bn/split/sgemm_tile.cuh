// One tile of u = x w^T in float32 FMAs, by a block of threads.
//
// A thread has 8 x 8 values of a 128 x 64 tile, which takes half of the 256 threads. The other half
// ("slice") has the same values over the other half of every k-block, and the two are added at the
// end: narrower tiles spread few flagged rows over more multiprocessors, and smaller pieces of a
// thread would read shared memory more often than it can be read.
#pragma once

#include <cstdint>

#include "linear_bn/split/exact_tiles.h"

namespace cutlass_bn::linear_bn::exact {

inline constexpr int kThreads = 256;
inline constexpr int kSlices = 2;
inline constexpr int kSliceThreads = kThreads / kSlices;  // 16 down the rows x 8 along the columns
inline constexpr int kTileN = 64;
inline constexpr int kBlockK = 16;
inline constexpr int kSliceK = kBlockK / kSlices;
inline constexpr int kChunkK = 512;  // products added up before they are added to the total:
                                     // shorter sums have smaller errors
inline constexpr int kColumns = 4;   // of a thread, in the result

template <int kTileM>
inline constexpr int kRows = kTileM / 16;  // of a thread, 4 adjacent ones and as many 64 rows
                                           // further down

// Where a thread's values are. Half-warps read two groups of rows and eight of columns, each shared
// by neighbours: the pattern that 16-byte reads of shared memory broadcast best.
struct ThreadPlace {
  int slice = threadIdx.x / kSliceThreads;
  int slice_thread = threadIdx.x % kSliceThreads;
  int row_lane = threadIdx.x % 32 / 16 * 2 + threadIdx.x % 2;  // of 4 in a warp
  int row_group = slice_thread / 32 * 4 + row_lane;            // of 16
  int column_group = threadIdx.x / 2 % 8;                      // of 8

  __device__ __forceinline__ int row(int i) const { return i / 4 * 64 + row_group * 4 + i % 4; }
  // The first of the kColumns adjacent ones.
  __device__ __forceinline__ int column() const { return slice * 32 + column_group * 4; }
};

// A k-block of an operand's rows in shared memory, [k][row]. The rows are permuted in fours, so
// that neither a write of four k of eight rows nor a read of adjacent rows meets a bank twice.
template <int kPanelRows>
struct Panel {
  alignas(16) float values[kBlockK * kPanelRows];

  __device__ static __forceinline__ int index(int k, int row) {
    return k * kPanelRows + (row ^ k / 4 * 8);
  }
  __device__ __forceinline__ float4& four(int index) {
    return *reinterpret_cast<float4*>(&values[index]);
  }
};

// Carries an operand's k-blocks from global memory through registers to shared memory, four
// elements at a time along the dimension that is contiguous. What is outside of the matrix is 0.
template <int kPanelRows>
struct PanelLoader {
  static constexpr int kFours = kPanelRows * kBlockK / 4 / kThreads;

  bool k_contiguous, aligned;
  int64_t step;                // elements from one k-block to the next
  int rows;                    // of the panel inside the matrix
  int row[kFours], k[kFours];  // of the first of each four
  float const* from[kFours];
  float4 four[kFours];

  __device__ __forceinline__ PanelLoader(ExactOperand const& operand, bool aligned,
                                         int64_t first_row, int64_t matrix_rows)
      : k_contiguous(operand.k_stride == 1),
        aligned(aligned),
        step(kBlockK * operand.k_stride),
        rows(static_cast<int>(min(matrix_rows - first_row, int64_t(kPanelRows)))) {
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      int const number = threadIdx.x + i * kThreads;
      row[i] = k_contiguous ? number / (kBlockK / 4) : number % (kPanelRows / 4) * 4;
      k[i] = k_contiguous ? number % (kBlockK / 4) * 4 : number / (kPanelRows / 4);
      from[i] = operand.data + (first_row + row[i]) * operand.row_stride + k[i] * operand.k_stride;
    }
  }

  // The next k-block, of which k_left are inside the matrix.
  __device__ __forceinline__ void load(int k_left) {
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      int const row_count = rows - row[i], k_count = k_left - k[i];
      int const count = row_count <= 0 || k_count <= 0 ? 0 : k_contiguous ? k_count : row_count;
      float const* const p = from[i];
      if (aligned && count >= 4) {
        four[i] = *reinterpret_cast<float4 const*>(p);
      } else {
        four[i].x = count > 0 ? p[0] : 0.f;
        four[i].y = count > 1 ? p[1] : 0.f;
        four[i].z = count > 2 ? p[2] : 0.f;
        four[i].w = count > 3 ? p[3] : 0.f;
      }
      from[i] += step;
    }
  }

  __device__ __forceinline__ void store(Panel<kPanelRows>& panel) const {
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      int const index = Panel<kPanelRows>::index(k[i], row[i]);
      if (k_contiguous) {
        panel.values[index] = four[i].x;
        panel.values[index + kPanelRows] = four[i].y;
        panel.values[index + 2 * kPanelRows] = four[i].z;
        panel.values[index + 3 * kPanelRows] = four[i].w;
      } else {
        panel.four(index) = four[i];
      }
    }
  }
};

template <int kTileM>
union TileStorage {
  struct {
    Panel<kTileM> x[2];
    Panel<kTileN> w[2];
  } panels;
  float4 exchange[kSlices][kRows<kTileM>][kSliceThreads];
};

template <int kTileM>
using Accumulators = float[kRows<kTileM>][2 * kColumns];

__device__ __forceinline__ void unpack(float4 const& four, float* to) {
  to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

// One k-block's products of a thread's slice.
template <int kTileM>
__device__ __forceinline__ void accumulate(Panel<kTileM>& x, Panel<kTileN>& w,
                                           ThreadPlace const& place, Accumulators<kTileM>& sum) {
#pragma unroll
  for (int i = 0; i < kSliceK; ++i) {
    int const k = place.slice * kSliceK + i;
    float a[kRows<kTileM>], b[2 * kColumns];
#pragma unroll
    for (int r = 0; r < kRows<kTileM>; r += 4)
      unpack(x.four(Panel<kTileM>::index(k, place.row_group * 4) + r / 4 * 64), a + r);
#pragma unroll
    for (int c = 0; c < 2 * kColumns; c += 4)
      unpack(w.four(Panel<kTileN>::index(k, place.column_group * 4) + c / 4 * 32), b + c);
#pragma unroll
    for (int r = 0; r < kRows<kTileM>; ++r) {
#pragma unroll
      for (int c = 0; c < 2 * kColumns; ++c) sum[r][c] = fmaf(a[r], b[c], sum[r][c]);
    }
  }
}

// total += sum, sum = 0.
template <int kTileM>
__device__ __forceinline__ void promote(Accumulators<kTileM>& sum, Accumulators<kTileM>& total) {
#pragma unroll
  for (int r = 0; r < kRows<kTileM>; ++r) {
#pragma unroll
    for (int c = 0; c < 2 * kColumns; ++c) {
      total[r][c] += sum[r][c];
      sum[r][c] = 0.f;
    }
  }
}

// The tile whose first element is (first_row, first_column). Each thread gets the values at its
// ThreadPlace; those outside of the matrix mean nothing.
template <int kTileM>
__device__ __forceinline__ void multiply_tile(ExactProblem const& p, bool x_aligned, bool w_aligned,
                                              int64_t first_row, int64_t first_column,
                                              TileStorage<kTileM>& storage,
                                              float (&result)[kRows<kTileM>][kColumns]) {
  ThreadPlace const place;
  auto& panels = storage.panels;
  Accumulators<kTileM> sum = {}, total = {};
  {
    PanelLoader<kTileM> x(p.x, x_aligned, first_row, p.m);
    PanelLoader<kTileN> w(p.w, w_aligned, first_column, p.n);
    int const k = static_cast<int>(p.k);
    x.load(k);
    w.load(k);
    __syncthreads();  // the previous tile's reads of the storage
    x.store(panels.x[0]);
    w.store(panels.w[0]);
    __syncthreads();
    int stage = 0;
    for (int done = 0; done < k;) {
      int const chunk_end = min(done + kChunkK, k);
#pragma unroll 1
      for (; done < chunk_end; done += kBlockK, stage ^= 1) {
        bool const more = k - done > kBlockK;
        if (more) {
          x.load(k - done - kBlockK);
          w.load(k - done - kBlockK);
        }
        accumulate<kTileM>(panels.x[stage], panels.w[stage], place, sum);
        if (more) {
          x.store(panels.x[stage ^ 1]);
          w.store(panels.w[stage ^ 1]);
        }
        __syncthreads();
      }
      promote<kTileM>(sum, total);
    }
  }

  // Each slice hands over the half of the columns that the other one keeps.
  bool const first = place.slice == 0;
#pragma unroll
  for (int r = 0; r < kRows<kTileM>; ++r) {
    float const(&t)[2 * kColumns] = total[r];
    storage.exchange[place.slice][r][place.slice_thread] = first
                                                               ? make_float4(t[4], t[5], t[6], t[7])
                                                               : make_float4(t[0], t[1], t[2],
                                                                             t[3]);
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRows<kTileM>; ++r) {
    float other[kColumns];
    unpack(storage.exchange[place.slice ^ 1][r][place.slice_thread], other);
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      result[r][c] = (first ? total[r][c] : total[r][c + kColumns]) + other[c];
  }
}

}  // namespace cutlass_bn::linear_bn::exact
