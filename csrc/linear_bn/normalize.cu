// The normalise pass: reads u once, writes y once, at the speed of memory. Many short blocks in the
// order of memory keep reads and writes close together in DRAM
// (docs/notes/2026-11-29-memory-bound-kernels.md); what a block's columns need is worked out once,
// by all its threads.
#include "common/affine.cuh"
#include "common/launch.cuh"
#include "common/math.h"
#include "common/packet.cuh"
#include "linear_bn/normalize.h"

namespace cutlass_bn::linear_bn {
namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 32;  // threads side by side, each with N adjacent columns; kThreads / kWidth
                            // rows of them
constexpr int kRowStep = kThreads / kWidth;
constexpr int kBatches = 2;  // loads of a thread that are in flight together, so many times

template <int N>
inline constexpr int kRows = N == 8 ? 4 : 8;  // rows of a batch; wider vectors need more registers
                                              // each

template <int N>
inline constexpr int kBlockRows = kRowStep * kRows<N> * kBatches;

__device__ __forceinline__ FoldedAffine column_map(NormalizeParams const& p, int64_t column) {
  if (p.stats == nullptr) return folded_affine(p.layer, column);
  float const mean = p.stats[column], remainder = p.stats[p.n + column],
              invstd = p.stats[2 * p.n + column];
  float const gain = gain_of(p.layer.gamma.load_or(column, 1.f), p.layer.scale.load_or(column, 1.f),
                             invstd);
  return {1.f, -mean, gain, shift_of(p.layer.beta.load_or(column, 0.f), gain, remainder)};
}

// y may be wider than u (half in, float32 out): then a vector of u becomes several 16-byte stores.
template <int N, class Out>
__device__ __forceinline__ void store_row(Out* y, float const (&v)[N]) {
  constexpr int kStore = N < kVectorWidth<Out> ? N : kVectorWidth<Out>;
#pragma unroll
  for (int part = 0; part < N / kStore; ++part) {
    Packet<Out, kStore> packed;
    packed.transform([&](int i, float) { return v[part * kStore + i]; });
    packed.store(y + part * kStore);
  }
}

// N: columns per thread. Blocks are taken from the last rows to the first: the GEMM wrote the last
// ones last, so they are still in L2.
template <class In, class Out, int N>
__global__ void __launch_bounds__(kThreads, 3)
    normalize_kernel(__grid_constant__ NormalizeParams const p, unsigned column_blocks) {
  constexpr int kLoads = kRows<N>;
  __shared__ float shared[4][kWidth * N];
  wait_for_previous_kernel();
  allow_next_kernel();
  unsigned const index = gridDim.x - 1 - blockIdx.x;
  unsigned const row_block = index / column_blocks;
  int64_t const first_column = int64_t(index - row_block * column_blocks) * (kWidth * N);
  for (int c = threadIdx.x; c < kWidth * N && first_column + c < p.n; c += kThreads) {
    FoldedAffine const map = column_map(p, first_column + c);
    shared[0][c] = map.scale, shared[1][c] = map.shift, shared[2][c] = map.factor,
    shared[3][c] = map.beta;
  }
  __syncthreads();

  int const lane = threadIdx.x % kWidth * N;
  int64_t const column = first_column + lane;
  if (column >= p.n) return;
  FoldedAffine map[N];
#pragma unroll
  for (int j = 0; j < N; ++j)
    map[j] = {shared[0][lane + j], shared[1][lane + j], shared[2][lane + j], shared[3][lane + j]};

  int64_t row = int64_t(row_block) * kBlockRows<N> + threadIdx.x / kWidth;
#pragma unroll 1
  for (int batch = 0; batch < kBatches; ++batch, row += kRowStep * kLoads) {
    In const* const u = static_cast<In const*>(p.u) + row * p.ldu + column;
    Out* const y = static_cast<Out*>(p.y) + row * p.ldy + column;
    Packet<In, N> loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (row + i * kRowStep < p.m) loaded[i].load(u + i * kRowStep * p.ldu);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (row + i * kRowStep >= p.m) return;
      float v[N];
#pragma unroll
      for (int j = 0; j < N; ++j) v[j] = map[j](loaded[i][j]);
      activate_all(v, p.layer.activation);
      store_row(y + i * kRowStep * p.ldy, v);
    }
  }
}

template <class In, class Out, int N>
void launch(NormalizeParams const& p, cudaStream_t stream) {
  int64_t const column_blocks = ceil_div(p.n, kWidth * N),
                row_blocks = ceil_div(p.m, kBlockRows<N>);
  CUTLASS_BN_CHECK(row_blocks * column_blocks <= INT32_MAX, "normalize: too many blocks of work (",
                   row_blocks * column_blocks, ")");
  launch_kernel(normalize_kernel<In, Out, N>,
                dim3(static_cast<unsigned>(row_blocks * column_blocks)), dim3(kThreads), 0, stream,
                p, static_cast<unsigned>(column_blocks));
}

bool rows_aligned(void const* data, int64_t row_stride, DType dtype) {
  return is_aligned(data) && row_stride * static_cast<int64_t>(size_of(dtype)) % 16 == 0;
}

template <class In, class Out>
void launch_widest(NormalizeParams const& p, cudaStream_t stream) {
  constexpr int N = kVectorWidth<In>;
  bool const vectorized = p.n % N == 0 && rows_aligned(p.u, p.ldu, p.u_dtype) &&
                          rows_aligned(p.y, p.ldy, p.y_dtype);
  return vectorized ? launch<In, Out, N>(p, stream) : launch<In, Out, 1>(p, stream);
}

}  // namespace

void launch_normalize(NormalizeParams const& p, cudaStream_t stream) {
  if (p.m == 0 || p.n == 0) return;
  CUTLASS_BN_CHECK(p.y_dtype == p.u_dtype || p.y_dtype == DType::kFloat32,
                   "normalize: expected an output of ", name_of(p.u_dtype), " or float32, got ",
                   name_of(p.y_dtype));
  dispatch_dtype(p.u_dtype, [&](auto tag) {
    using In = typename decltype(tag)::type;
    return p.y_dtype == p.u_dtype ? launch_widest<In, In>(p, stream)
                                  : launch_widest<In, float>(p, stream);
  });
}

}  // namespace cutlass_bn::linear_bn
