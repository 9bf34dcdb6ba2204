// The transpose of a float32 matrix at nearly the speed of a copy: square tiles through shared
// memory, so that both what is read and what is written are runs of 256 bytes.
#include "common/check.h"
#include "common/launch.cuh"
#include "common/math.h"
#include "common/packet.cuh"
#include "linear_bn/transpose.h"

namespace cutlass_bn::linear_bn {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 64;

// Blocks are numbered along the rows of x, as it lies in memory. N: elements of an access.
template <int N>
__global__ void __launch_bounds__(kThreads, 6)
    transpose_kernel(__grid_constant__ TransposeParams const p, unsigned column_tiles) {
  constexpr int kAcross = kTile / N, kStep = kThreads / kAcross, kAccesses = kTile / kStep;
  __shared__ float tile[kTile][kTile + 1];
  wait_for_previous_kernel();
  allow_next_kernel();
  unsigned const row_tile = blockIdx.x / column_tiles;
  int64_t const first_row = int64_t(row_tile) * kTile,
                first_column = int64_t(blockIdx.x - row_tile * column_tiles) * kTile;
  int const across = threadIdx.x % kAcross * N, down = threadIdx.x / kAcross;

  Packet<float, N> loaded[kAccesses];
#pragma unroll
  for (int i = 0; i < kAccesses; ++i) {
    int64_t const row = first_row + down + i * kStep;
    loaded[i] = {};
    if (row < p.rows && first_column + across < p.columns)
      loaded[i].load(p.x + row * p.ldx + first_column + across);
  }
#pragma unroll
  for (int i = 0; i < kAccesses; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) tile[down + i * kStep][across + j] = loaded[i][j];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kAccesses; ++i) {
    int const from = down + i * kStep;
    int64_t const column = first_column + from;
    if (column >= p.columns || first_row + across >= p.rows) continue;
    Packet<float, N> packet;
    packet.transform([&](int j, float) { return tile[across + j][from]; });
    packet.store(p.y + column * p.ldy + first_row + across);
  }
}

template <int N>
void launch(TransposeParams const& p, cudaStream_t stream) {
  int64_t const row_tiles = ceil_div(p.rows, kTile), column_tiles = ceil_div(p.columns, kTile);
  CUTLASS_BN_CHECK(row_tiles * column_tiles <= INT32_MAX, "transpose: too many blocks of work (",
                   row_tiles * column_tiles, ")");
  launch_kernel(transpose_kernel<N>, dim3(static_cast<unsigned>(row_tiles * column_tiles)),
                dim3(kThreads), 0, stream, p, static_cast<unsigned>(column_tiles));
}

}  // namespace

void launch_transpose(TransposeParams const& p, cudaStream_t stream) {
  if (p.rows == 0 || p.columns == 0) return;
  bool const whole_vectors = p.ldx % 4 == 0 && p.ldy % 4 == 0 && p.rows % 4 == 0 &&
                             p.columns % 4 == 0;
  bool const vectorized = whole_vectors && is_aligned(p.x) && is_aligned(p.y);
  return vectorized ? launch<4>(p, stream) : launch<1>(p, stream);
}

}  // namespace cutlass_bn::linear_bn
