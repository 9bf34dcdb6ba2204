// The normalise pass: reads u once, writes y once, at the speed of memory. Many short blocks in the order of memory keep reads and
// writes close together in DRAM (docs/performance.md); what a block's columns need is worked out once, by all its threads.
#include "common/launch.cuh"
#include "common/packet.cuh"
#include "linear_bn/folded.cuh"
#include "linear_bn/launch.h"

namespace cutlass_bn::linear_bn {
namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 32;  // threads side by side, each with N adjacent columns; kThreads / kWidth rows of them
constexpr int kRowStep = kThreads / kWidth;
constexpr int kBatches = 2;  // loads of a thread that are in flight together, so many times

template <int N>
inline constexpr int kRows = N == 8 ? 4 : 8;  // rows of a batch; wider vectors need more registers each

template <int N>
inline constexpr int kBlockRows = kRowStep * kRows<N> * kBatches;

__device__ __forceinline__ ColumnMap column_map(NormalizeParams const& p, int64_t column) {
  float const invstd = p.stats[2 * p.n + column];
  float const factor = p.gamma.load_or(column, 1.f) * (p.scale.load_or(column, 1.f) * invstd);
  float const remainder = p.stats[p.n + column];  // of the mean's rounding
  return {1.f, -p.stats[column], factor, fmaf(-remainder, factor, p.beta.load_or(column, 0.f))};
}

__device__ __forceinline__ ColumnMap column_map(NormalizeInferenceParams const& p, int64_t column) { return folded_map(p, column); }

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

// N: columns per thread. Blocks are taken from the last rows to the first: the GEMM wrote the last ones last, so they are still
// in L2.
template <class In, class Out, int N, class Params>
__global__ void __launch_bounds__(kThreads, 3) normalize_kernel(Params const p, unsigned column_blocks) {
  constexpr int kLoads = kRows<N>;
  __shared__ float shared[4][kWidth * N];
  wait_for_previous_kernel();
  allow_next_kernel();
  NormalizeTensors const& t = p.tensors;
  unsigned const index = gridDim.x - 1 - blockIdx.x;
  unsigned const row_block = index / column_blocks;
  int64_t const first_column = t.n_begin + int64_t(index - row_block * column_blocks) * (kWidth * N);
  for (int c = threadIdx.x; c < kWidth * N && first_column + c < t.n_end; c += kThreads) {
    ColumnMap const map = column_map(p, first_column + c);
    shared[0][c] = map.scale, shared[1][c] = map.shift, shared[2][c] = map.factor, shared[3][c] = map.beta;
  }
  __syncthreads();

  int const lane = threadIdx.x % kWidth * N;
  int64_t const column = first_column + lane;
  if (column >= t.n_end) return;
  ColumnMap map[N];
#pragma unroll
  for (int j = 0; j < N; ++j) map[j] = {shared[0][lane + j], shared[1][lane + j], shared[2][lane + j], shared[3][lane + j]};

  int64_t row = int64_t(row_block) * kBlockRows<N> + threadIdx.x / kWidth;
#pragma unroll 1
  for (int batch = 0; batch < kBatches; ++batch, row += kRowStep * kLoads) {
    In const* const u = static_cast<In const*>(t.u) + row * t.ldu + column;
    Out* const y = static_cast<Out*>(t.y) + row * t.ldy + column;
    Packet<In, N> loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (row + i * kRowStep < t.m) loaded[i].load(u + i * kRowStep * t.ldu);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (row + i * kRowStep >= t.m) return;
      float v[N];
#pragma unroll
      for (int j = 0; j < N; ++j) v[j] = map[j](loaded[i][j]);
      activate_all(v, t.activation);
      store_row(y + i * kRowStep * t.ldy, v);
    }
  }
}

template <class In, class Out, int N, class Params>
void launch(Params const& params, cudaStream_t stream) {
  NormalizeTensors const& t = params.tensors;
  int64_t const column_blocks = (t.n_end - t.n_begin + kWidth * N - 1) / (kWidth * N);
  int64_t const row_blocks = (t.m + kBlockRows<N> - 1) / kBlockRows<N>;
  CUTLASS_BN_CHECK(row_blocks * column_blocks <= INT32_MAX, "normalize: too many blocks of work (", row_blocks * column_blocks,
                   ")");
  launch_kernel(normalize_kernel<In, Out, N, Params>, dim3(static_cast<unsigned>(row_blocks * column_blocks)), dim3(kThreads), 0,
                stream, params, static_cast<unsigned>(column_blocks));
}

bool is_aligned(void const* data, int64_t row_stride, int64_t first_column, DType dtype) {
  auto const bytes = static_cast<int64_t>(size_of(dtype));
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && row_stride * bytes % 16 == 0 && first_column * bytes % 16 == 0;
}

template <class In, class Out, class Params>
void launch_widest(Params const& params, cudaStream_t stream) {
  NormalizeTensors const& t = params.tensors;
  constexpr int kWidth = kVectorWidth<In>;
  bool const vectorized = (t.n_end - t.n_begin) % kWidth == 0 && is_aligned(t.u, t.ldu, t.n_begin, t.u_dtype) &&
                          is_aligned(t.y, t.ldy, t.n_begin, t.y_dtype);
  return vectorized ? launch<In, Out, kWidth>(params, stream) : launch<In, Out, 1>(params, stream);
}

template <class Params>
void dispatch(Params const& params, cudaStream_t stream) {
  NormalizeTensors const& t = params.tensors;
  if (t.m == 0 || t.n_begin == t.n_end) return;
  CUTLASS_BN_CHECK(t.y_dtype == t.u_dtype || t.y_dtype == DType::kFloat32, "normalize: expected an output of ", name_of(t.u_dtype),
                   " or float32, got ", name_of(t.y_dtype));
  dispatch_dtype(t.u_dtype, [&](auto tag) {
    using In = typename decltype(tag)::type;
    return t.y_dtype == t.u_dtype ? launch_widest<In, In>(params, stream) : launch_widest<In, float>(params, stream);
  });
}

}  // namespace

void launch_normalize(NormalizeParams const& params, cudaStream_t stream) { dispatch(params, stream); }

void launch_normalize_inference(NormalizeInferenceParams const& params, cudaStream_t stream) { dispatch(params, stream); }

}  // namespace cutlass_bn::linear_bn
