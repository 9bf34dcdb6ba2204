// The split of a matrix that lies in memory as [k, rows]: its planes are the transpose's. Two
// passes: the rows' maxima, then the split, which transposes in registers. A thread reads eight k
// of four rows and so has a whole 16-byte packet of each row's planes; neighbours in a warp
// complete 128 bytes of what is read and 64 of what is written.
#include "common/launch.cuh"
#include "common/packet.cuh"
#include "linear_bn/split/element.cuh"
#include "linear_bn/split/kernels.h"

namespace cutlass_bn::linear_bn {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Blocks numbered along the rows first, as the matrix lies in memory.
struct Tiling {
  int64_t row_tiles, k_tiles;

  int64_t blocks() const { return row_tiles * k_tiles; }
};

Tiling tile(SplitSource const& source, int rows, int k) {
  Tiling const tiling{(source.rows + rows - 1) / rows, (source.k + k - 1) / k};
  CUTLASS_BN_CHECK(tiling.blocks() <= INT32_MAX, "split: too many blocks of work (",
                   tiling.blocks(), ")");
  return tiling;
}

// --- maxima ---

constexpr int kLoads = 8;    // of a thread, in flight together
constexpr int kBatches = 2;  // so many times
constexpr int kMaximaK = kWarps * kLoads * kBatches;

// A thread keeps kWidth rows; a block's warps take the same rows at different k. Also clears the
// census, which the split adds up.
template <int kWidth>
__global__ void __launch_bounds__(kThreads, 5)
    column_maxima_kernel(__grid_constant__ SplitSource const source, uint32_t* maxima,
                         uint32_t* census, unsigned row_tiles) {
  constexpr int kRows = 32 * kWidth;
  __shared__ uint32_t shared[kWarps][kRows];
  wait_for_previous_kernel();
  allow_next_kernel();
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  unsigned const k_tile = blockIdx.x / row_tiles;
  int64_t const first_row = int64_t(blockIdx.x - k_tile * row_tiles) * kRows,
                row = first_row + lane * kWidth;
  int64_t k = int64_t(k_tile) * kMaximaK + warp;

  uint32_t largest[kWidth] = {};
#pragma unroll 1
  for (int batch = 0; batch < kBatches; ++batch, k += kWarps * kLoads) {
    float const* const x = source.data + k * source.k_stride + row;
    Packet<float, kWidth> loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      loaded[i] = {};
      if (row < source.rows && k + i * kWarps < source.k)
        loaded[i].load(x + i * kWarps * source.k_stride);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) largest[j] = max(largest[j], magnitude(loaded[i].word[j]));
    }
  }
#pragma unroll
  for (int j = 0; j < kWidth; ++j) shared[warp][lane * kWidth + j] = largest[j];
  __syncthreads();
  if (threadIdx.x >= kRows || first_row + threadIdx.x >= source.rows) return;
  uint32_t of_block = shared[0][threadIdx.x];
#pragma unroll
  for (int i = 1; i < kWarps; ++i) of_block = max(of_block, shared[i][threadIdx.x]);
  atomicMax(maxima + first_row + threadIdx.x, of_block);
  if (k_tile == 0) census[first_row + threadIdx.x] = 0;
}

// --- split ---

constexpr int kPacket = 8, kQuad = 4;                          // k and rows of a thread
constexpr int kWarpK = 4 * kPacket, kWarpRows = 8 * kQuad;     // of a warp
constexpr int kTileK = 4 * kWarpK, kTileRows = 2 * kWarpRows;  // of a block

// Four rows of the matrix at one k: adjacent ones in one load, or else those of the warp that are
// eight apart.
template <int kWidth>
struct Quad {
  static constexpr int kLoads = kQuad / kWidth;
  Packet<float, kWidth> x[kLoads];

  static __device__ __forceinline__ int first_row(int quad) { return quad * kWidth; }
  static __device__ __forceinline__ constexpr int row(int i) {
    return i / kWidth * 8 * kWidth + i % kWidth;
  }  // from the first

  __device__ __forceinline__ void load(float const* p, int rows_left) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      x[i] = {};
      if (row(i * kWidth) < rows_left) x[i].load(p + row(i * kWidth));
    }
  }

  __device__ __forceinline__ float operator[](int i) const { return x[i / kWidth][i % kWidth]; }
};

// Takes the tiles from the last to the first: the maxima's pass has read the last ones last, so
// they are still in L2.
template <int kWidth>
__global__ void __launch_bounds__(kThreads, 4)
    split_columns_kernel(__grid_constant__ SplitSource const source,
                         __grid_constant__ SplitMatrix const result, uint32_t const* maxima,
                         unsigned row_tiles) {
  __shared__ uint32_t counts[kTileRows];
  __shared__ bool lossy[kTileRows];
  if (threadIdx.x < kTileRows) counts[threadIdx.x] = 0, lossy[threadIdx.x] = false;
  wait_for_previous_kernel();
  allow_next_kernel();
  __syncthreads();
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  unsigned const index = gridDim.x - 1 - blockIdx.x, k_tile = index / row_tiles;
  int64_t const first_row = int64_t(index - k_tile * row_tiles) * kTileRows;
  int const row_in_tile = warp % 2 * kWarpRows + Quad<kWidth>::first_row(lane % 8);
  int64_t const row = first_row + row_in_tile;
  int64_t const k = int64_t(k_tile) * kTileK + warp / 2 * kWarpK + lane / 8 * kPacket;
  int const rows_left = static_cast<int>(min(source.rows - row, int64_t(kWarpRows)));
  int const k_left = static_cast<int>(min(source.k - k, int64_t(kPacket)));

  Quad<kWidth> largest, x[kPacket];
  largest.load(reinterpret_cast<float const*>(maxima) + row, rows_left);
  float const* const p = source.data + k * source.k_stride + row;
#pragma unroll
  for (int i = 0; i < kPacket; ++i) x[i].load(p + i * source.k_stride, i < k_left ? rows_left : 0);

#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
    RowScale const scale = row_scale(__float_as_uint(largest[j]), source.k);
    SplitPacket<kPacket / 2> packet;
    uint32_t census = 0;
#pragma unroll
    for (int i = 0; i < kPacket; i += 2) {
      float const x0 = scale.zero ? 0.f : x[i][j], x1 = scale.zero ? 0.f : x[i + 1][j];
      census = add_census(census, packet.set(i / 2, x0, x1, scale));
    }
    int const r = Quad<kWidth>::row(j);
    if (r < rows_left && k_left > 0) packet.store(result, (row + r) * result.ld + k);
    bool const first = k == 0 && r < rows_left;  // one thread of the row
    if (first) result.exponents[row + r] = scale.exponent;
    if (scale.zero) census = first ? scale.census : 0;
    // The lanes that share the row are eight apart.
    census = add_census(census, __shfl_xor_sync(kAllLanes, census, 8));
    census = add_census(census, __shfl_xor_sync(kAllLanes, census, 16));
    if (lane < 8) {
      atomicAdd(&counts[row_in_tile + r], census & ~kLossyRow);
      if (census & kLossyRow) lossy[row_in_tile + r] = true;
    }
  }
  __syncthreads();
  if (threadIdx.x >= kTileRows || first_row + threadIdx.x >= source.rows) return;
  uint32_t* const total = result.census + first_row + threadIdx.x;
  if (counts[threadIdx.x] != 0) atomicAdd(total, counts[threadIdx.x]);
  if (lossy[threadIdx.x]) atomicOr(total, kLossyRow);
}

template <int kWidth>
void launch(SplitSource const& source, SplitMatrix const& result, uint32_t* maxima,
            cudaStream_t stream) {
  Tiling const read = tile(source, 32 * kWidth, kMaximaK),
               written = tile(source, kTileRows, kTileK);
  CUTLASS_BN_CUDA(cudaMemsetAsync(maxima, 0, source.rows * sizeof(uint32_t), stream));
  launch_kernel(column_maxima_kernel<kWidth>, dim3(static_cast<unsigned>(read.blocks())),
                dim3(kThreads), 0, stream, source, maxima, result.census,
                static_cast<unsigned>(read.row_tiles));
  launch_kernel(split_columns_kernel<kWidth>, dim3(static_cast<unsigned>(written.blocks())),
                dim3(kThreads), 0, stream, source, result, maxima,
                static_cast<unsigned>(written.row_tiles));
}

}  // namespace

void launch_split_columns(SplitSource const& source, SplitMatrix const& result, uint32_t* maxima,
                          bool vectorized, cudaStream_t stream) {
  return vectorized ? launch<4>(source, result, maxima, stream)
                    : launch<1>(source, result, maxima, stream);
}

}  // namespace cutlass_bn::linear_bn
