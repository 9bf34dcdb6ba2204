// The normalise pass: reads u once, writes y once, at the speed of memory. A thread owns a few adjacent columns, whose parameters
// it keeps in registers, and walks down the rows.
#include <algorithm>

#include "common/launch.cuh"
#include "common/vector_access.cuh"
#include "linear_bn/launch.h"

namespace cutlass_bn::linear_bn {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 3;

// Independent loads per thread. Wider vectors need more registers each, for the data and for the columns' parameters.
template <int ColumnsPerThread>
inline constexpr int kLoadsInFlight = ColumnsPerThread == 8 ? 4 : 8;

// How the threads lie over the matrix: `width` side by side in a block, the other kThreads / width below them.
struct Tiling {
  int width;               // a power of two
  unsigned column_blocks;  // blocks side by side
  unsigned row_blocks;     // blocks that share the chunks of a column block
  int64_t chunks;          // of kThreads / width * kLoadsInFlight rows each
};

// Subtracts first: multiplying out would cancel at a large mean. The mean's remainder keeps its last bits.
struct BatchMap {
  float mean, remainder, factor, beta;

  __device__ __forceinline__ void load(NormalizeParams const& p, int64_t column) {
    mean = p.stats[column];
    remainder = p.stats[p.n + column];
    float const invstd = p.stats[2 * p.n + column];
    factor = p.gamma.load_or(column, 1.f) * (p.scale.load_or(column, 1.f) * invstd);
    beta = p.beta.load_or(column, 0.f);
  }
  __device__ __forceinline__ float operator()(float u) const { return fmaf((u - mean) - remainder, factor, beta); }
};

struct RunningMap {
  float scale, shift, factor, beta;

  __device__ __forceinline__ void load(NormalizeInferenceParams const& p, int64_t column) {
    scale = p.scale.load_or(column, 1.f);
    shift = fmaf(scale, p.bias.load_or(column, 0.f), -p.running_mean.load(column));
    factor = p.gamma.load_or(column, 1.f) * (1.f / sqrtf(p.running_var.load(column) + p.eps));
    beta = p.beta.load_or(column, 0.f);
  }
  __device__ __forceinline__ float operator()(float u) const { return fmaf(fmaf(scale, u, shift), factor, beta); }
};

template <class Params>
struct MapFor;
template <>
struct MapFor<NormalizeParams> {
  using type = BatchMap;
};
template <>
struct MapFor<NormalizeInferenceParams> {
  using type = RunningMap;
};

// One branch per vector instead of one per element.
template <int N>
__device__ __forceinline__ void activate_all(float (&v)[N], Activation activation) {
  auto const apply = [&v](auto const& function) {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = function(v[i]);
  };
  switch (activation) {
    case Activation::kRelu: apply([](float x) { return activate(x, Activation::kRelu); }); break;
    case Activation::kGelu: apply([](float x) { return activate(x, Activation::kGelu); }); break;
    case Activation::kSilu: apply([](float x) { return activate(x, Activation::kSilu); }); break;
    default: break;
  }
}

// y may be wider than u (half in, float32 out): then a vector of u becomes several 16-byte stores.
template <int N, class Out>
__device__ __forceinline__ void store_row(Out* y, float const (&v)[N]) {
  constexpr int kStore = N < kVectorWidth<Out> ? N : kVectorWidth<Out>;
#pragma unroll
  for (int part = 0; part < N / kStore; ++part) {
    Vector<Out, kStore> packed;
#pragma unroll
    for (int i = 0; i < kStore; ++i) packed.value[i] = from_float<Out>(v[part * kStore + i]);
    store_vector_streaming(y + part * kStore, packed);
  }
}

// N: columns per thread. Rows are taken from the last to the first: the GEMM wrote the last ones last, so they are still in L2.
template <class In, class Out, int N, class Params>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) normalize_kernel(Params const p, Tiling const tiling) {
  constexpr int kLoads = kLoadsInFlight<N>;
  wait_for_previous_kernel();
  allow_next_kernel();
  NormalizeTensors const& t = p.tensors;
  int const width = tiling.width;
  int64_t const column = t.n_begin + (int64_t(blockIdx.x % tiling.column_blocks) * width + threadIdx.x % width) * N;
  if (column >= t.n_end) return;
  typename MapFor<Params>::type map[N];
#pragma unroll
  for (int j = 0; j < N; ++j) map[j].load(p, column + j);

  int const row_step = kThreads / width;
  int64_t const u_step = row_step * t.ldu, y_step = row_step * t.ldy;
  for (int64_t chunk = tiling.chunks - 1 - blockIdx.x / tiling.column_blocks; chunk >= 0; chunk -= tiling.row_blocks) {
    int64_t const first_row = chunk * (row_step * kLoads) + threadIdx.x / width;
    if (first_row >= t.m) continue;
    int const rows_left = static_cast<int>(min(t.m - first_row, int64_t(row_step) * kLoads));
    In const* u = static_cast<In const*>(t.u) + first_row * t.ldu + column;
    Out* y = static_cast<Out*>(t.y) + first_row * t.ldy + column;
    Vector<In, N> loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      loaded[i] = load_vector_streaming<N>(u);
      if ((i + 1) * row_step < rows_left) u += u_step;  // past the end: the last row once more, without a branch
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i, y += y_step) {
      if (i * row_step >= rows_left) break;
      float v[N];
#pragma unroll
      for (int j = 0; j < N; ++j) v[j] = map[j](to_float(loaded[i].value[j]));
      activate_all(v, t.activation);
      store_row(y, v);
    }
  }
}

// The widest block that leaves at most an eighth of its threads idle, but whole warps side by side where there are columns enough.
Tiling choose_tiling(int64_t vectors, int64_t rows, int loads) {
  int narrowest = 1;
  while (narrowest < 32 && narrowest < vectors) narrowest *= 2;
  Tiling tiling{kThreads, 0, 0, 0};
  auto const padded = [&] { return (vectors + tiling.width - 1) / tiling.width * tiling.width; };
  while (tiling.width > narrowest && padded() * 8 > vectors * 9) tiling.width /= 2;
  int64_t const column_blocks = padded() / tiling.width;
  int64_t const rows_per_chunk = int64_t(kThreads / tiling.width) * loads;
  int64_t const resident = int64_t(kBlocksPerMultiprocessor) * device_info().sm_count;
  tiling.chunks = (rows + rows_per_chunk - 1) / rows_per_chunk;
  tiling.column_blocks = static_cast<unsigned>(column_blocks);
  tiling.row_blocks = static_cast<unsigned>(std::clamp<int64_t>(resident / column_blocks, 1, tiling.chunks));
  return tiling;
}

template <class In, class Out, int N, class Params>
void launch(Params const& params, cudaStream_t stream) {
  NormalizeTensors const& t = params.tensors;
  Tiling const tiling = choose_tiling((t.n_end - t.n_begin) / N, t.m, kLoadsInFlight<N>);
  launch_kernel(normalize_kernel<In, Out, N, Params>, dim3(tiling.column_blocks * tiling.row_blocks), dim3(kThreads), 0, stream,
                params, tiling);
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
