#include "linear_bn/split/exact_tiles.h"

#include <algorithm>

#include "common/affine.cuh"
#include "common/launch.cuh"
#include "common/math.h"
#include "linear_bn/split/sgemm_tile.cuh"
#include "linear_bn/split/tile_census.cuh"

namespace cutlass_bn::linear_bn {
namespace exact {
namespace {

constexpr int kWindow = 512;  // tiles along a dimension whose census is known at a time

struct Walk {
  int row_tiles = 0, column_tiles = 0;
  bool x_aligned = false, w_aligned = false,
       out_aligned = false;  // whether 16-byte accesses are possible
};

// A tile's part of the matrix.
struct TilePlace {
  int64_t first_row, first_column, row_tile;
  int rows;      // inside the matrix
  int64_t n;     // columns of the matrix
  bool aligned;  // the output
};

template <int kTileM>
using Values = float[kRows<kTileM>][kColumns];

template <int kTileM>
__device__ __forceinline__ void store_values(float* out, int64_t ld, TilePlace const& tile,
                                             Values<kTileM> const& values) {
  ThreadPlace const place;
  int64_t const column = tile.first_column + place.column();
#pragma unroll
  for (int r = 0; r < kRows<kTileM>; ++r) {
    if (place.row(r) >= tile.rows) continue;
    float* const to = out + (tile.first_row + place.row(r)) * ld + column;
    if (tile.aligned && column + kColumns <= tile.n) {
      *reinterpret_cast<float4*>(to) = make_float4(values[r][0], values[r][1], values[r][2],
                                                   values[r][3]);
    } else {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (column + c < tile.n) to[c] = values[r][c];
      }
    }
  }
}

// Adds N values up over the threads that have the same columns; all of them get the sums, which the
// order makes the same bits.
template <int N>
__device__ __forceinline__ void sum_over_rows(ThreadPlace const& place, float (&values)[N]) {
  constexpr unsigned kAllLanes = 0xffffffffu;
  constexpr int kWarps = kSliceThreads / 32;
  __shared__ float shared[kSlices][kWarps][8][N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    values[i] += __shfl_xor_sync(kAllLanes, values[i], 1);
    values[i] += __shfl_xor_sync(kAllLanes, values[i], 16);
    if (place.row_lane == 0)
      shared[place.slice][place.slice_thread / 32][place.column_group][i] = values[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) {
    values[i] = 0.f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp)
      values[i] += shared[place.slice][warp][place.column_group][i];
  }
}

// (mean, M2) of the tile's columns. The mean is taken around the first row, which makes it exact
// where all rows are equal.
template <int kTileM>
__device__ __forceinline__ void store_moments(float2* partials, TilePlace const& tile,
                                              Values<kTileM> const& values) {
  ThreadPlace const place;
  __shared__ float4 first_row[kTileN / kColumns];
  int const column_four = place.column() / kColumns;
  if (place.row_group == 0)
    first_row[column_four] = make_float4(values[0][0], values[0][1], values[0][2], values[0][3]);
  __syncthreads();
  float shift[kColumns], mean[kColumns], sum[kColumns] = {}, deviation[2 * kColumns] = {};
  unpack(first_row[column_four], shift);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    if (!isfinite(shift[c])) shift[c] = 0.f;  // the mean of values with one Inf is that Inf
#pragma unroll
    for (int r = 0; r < kRows<kTileM>; ++r)
      sum[c] += place.row(r) < tile.rows ? values[r][c] - shift[c] : 0.f;
  }
  sum_over_rows(place, sum);
  float const count = float(tile.rows);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    mean[c] = shift[c] + sum[c] / count;
#pragma unroll
    for (int r = 0; r < kRows<kTileM>; ++r) {
      float const d = place.row(r) < tile.rows ? values[r][c] - mean[c] : 0.f;
      deviation[c] += d;
      deviation[kColumns + c] = fmaf(d, d, deviation[kColumns + c]);
    }
  }
  sum_over_rows(place, deviation);
  if (place.row_group != 0) return;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    int64_t const column = tile.first_column + place.column() + c;
    if (column >= tile.n) continue;
    // What is left of the deviations is the rounding of the mean. The clamp keeps NaN.
    float const m2 = fmaf(-deviation[c], deviation[c] / count, deviation[kColumns + c]);
    partials[tile.row_tile * tile.n + column] = make_float2(mean[c], m2 < 0.f ? 0.f : m2);
  }
}

template <int kTileM>
__device__ __forceinline__ void finish_tile(ExactProduct const& p, TilePlace const& tile,
                                            Values<kTileM>& values) {
  store_values<kTileM>(p.out, p.ldo, tile, values);
}

template <int kTileM>
__device__ __forceinline__ void finish_tile(ExactMoments const& p, TilePlace const& tile,
                                            Values<kTileM>& values) {
  store_values<kTileM>(p.u, p.ldu, tile, values);
  store_moments<kTileM>(p.partials, tile, values);
}

template <int kTileM>
__device__ __forceinline__ void finish_tile(ExactInference const& p, TilePlace const& tile,
                                            Values<kTileM>& values) {
  __shared__ FoldedAffine maps[kTileN];
  int64_t const column = tile.first_column + threadIdx.x;
  if (threadIdx.x < kTileN && column < tile.n) maps[threadIdx.x] = folded_affine(p.layer, column);
  __syncthreads();
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    FoldedAffine const map = maps[ThreadPlace().column() + c];
#pragma unroll
    for (int r = 0; r < kRows<kTileM>; ++r) values[r][c] = map(values[r][c]);
  }
#pragma unroll
  for (int r = 0; r < kRows<kTileM>; ++r) activate_all(values[r], p.layer.activation);
  store_values<kTileM>(p.y, p.ldy, tile, values);
}

template <int kTileM, class Params>
__global__ void __launch_bounds__(kThreads, 1)
    exact_kernel(__grid_constant__ Params const p, __grid_constant__ Walk const walk) {
  __shared__ TileCensus row_census[kWindow], column_census[kWindow];
  __shared__ TileStorage<kTileM> storage;
  ExactProblem const& problem = p.problem;
  wait_for_previous_kernel();
  allow_next_kernel();

  // Almost always one window.
  for (int row_begin = 0; row_begin < walk.row_tiles; row_begin += kWindow) {
    for (int column_begin = 0; column_begin < walk.column_tiles; column_begin += kWindow) {
      int const rows = min(kWindow, walk.row_tiles - row_begin),
                columns = min(kWindow, walk.column_tiles - column_begin);
      __syncthreads();
      bool any = take_census<kTileM>(problem.x.census, problem.m, row_begin, rows, row_census);
      any |= take_census<kTileN>(problem.w.census, problem.n, column_begin, columns, column_census);
      if (!__syncthreads_or(any)) continue;

      // Every block has the same number of the tiles of a row, and nearly so of a column: see
      // launch().
#pragma unroll 1
      for (int item = blockIdx.x; item < rows * columns; item += gridDim.x) {
        int const row = item / columns, column = item % columns;
        if (!needs_exact(row_census[row], column_census[column], static_cast<int>(problem.k)))
          continue;
        TilePlace tile;
        tile.row_tile = row_begin + row;
        tile.first_row = tile.row_tile * kTileM;
        tile.first_column = int64_t(column_begin + column) * kTileN;
        tile.rows = static_cast<int>(min(problem.m - tile.first_row, int64_t(kTileM)));
        tile.n = problem.n;
        tile.aligned = walk.out_aligned;
        Values<kTileM> values;
        multiply_tile<kTileM>(problem, walk.x_aligned, walk.w_aligned, tile.first_row,
                              tile.first_column, storage, values);
        finish_tile<kTileM>(p, tile, values);
      }
    }
  }
}

bool rows_aligned(float const* data, int64_t stride) { return is_aligned(data) && stride % 4 == 0; }

bool rows_aligned(ExactOperand const& operand, char const* name) {
  bool const k_contiguous = operand.k_stride == 1;
  CUTLASS_BN_CHECK(k_contiguous || operand.row_stride == 1, name,
                   ": expected a stride of 1 along the rows or along k, got ", operand.row_stride,
                   " and ", operand.k_stride);
  return rows_aligned(operand.data, k_contiguous ? operand.row_stride : operand.k_stride);
}

template <class Params>
void launch(Params const& params, float const* out, int64_t ld, cudaStream_t stream) {
  ExactProblem const& p = params.problem;
  if (p.m == 0 || p.n == 0) return;
  CUTLASS_BN_CHECK(p.rows_per_tile == 128 || p.rows_per_tile == 64,
                   "rows_per_tile: expected 128 or 64, got ", p.rows_per_tile);
  CUTLASS_BN_CHECK(p.k < int64_t(1) << 30, "k: expected less than 2^30, got ", p.k);
  int64_t const row_tiles = ceil_div(p.m, p.rows_per_tile), column_tiles = ceil_div(p.n, kTileN);
  CUTLASS_BN_CHECK(row_tiles < 1 << 30 && column_tiles < 1 << 30,
                   "m, n: more tiles than can be counted, ", p.m, " x ", p.n);
  // An odd number of blocks, as that of the columns' tiles is mostly even: the tiles of one column
  // then fall to all of them.
  int64_t const blocks = std::min<int64_t>((device_info().sm_count - 1) | 1,
                                           row_tiles * column_tiles);
  Walk walk;
  walk.row_tiles = static_cast<int>(row_tiles);
  walk.column_tiles = static_cast<int>(column_tiles);
  walk.x_aligned = rows_aligned(p.x, "x");
  walk.w_aligned = rows_aligned(p.w, "w");
  walk.out_aligned = rows_aligned(out, ld);
  auto const kernel = p.rows_per_tile == 128 ? exact_kernel<128, Params> : exact_kernel<64, Params>;
  launch_kernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, params,
                walk);
}

}  // namespace
}  // namespace exact

void launch_exact(ExactMoments const& params, cudaStream_t stream) {
  exact::launch(params, params.u, params.ldu, stream);
}

void launch_exact(ExactInference const& params, cudaStream_t stream) {
  exact::launch(params, params.y, params.ldy, stream);
}

void launch_exact(ExactProduct const& params, cudaStream_t stream) {
  exact::launch(params, params.out, params.ldo, stream);
}

}  // namespace cutlass_bn::linear_bn
