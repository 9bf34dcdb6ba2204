// Normalises a random [N, C, H, W] activation by its batch statistics and checks the first channel's mean and variance.
#include <cutlass_bn/batch_norm/launch.h>
#include <cutlass_bn/common/finalize.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <random>
#include <vector>

namespace {

template <class T>
struct CudaFree {
  void operator()(T* p) const { cudaFree(p); }
};

template <class T>
std::unique_ptr<T[], CudaFree<T>> allocate(int64_t count) {
  void* p = nullptr;
  CUTLASS_BN_CUDA(cudaMalloc(&p, static_cast<size_t>(count) * sizeof(T)));
  return std::unique_ptr<T[], CudaFree<T>>(static_cast<T*>(p));
}

void run() {
  using namespace cutlass_bn;
  int64_t const batch = 16, channels = 64, area = 56 * 56, size = batch * channels * area;

  std::vector<float> values(static_cast<size_t>(size));
  std::mt19937 generator(0);
  std::normal_distribution<float> normal(100.f, 3.f);
  for (float& v : values) v = normal(generator);
  auto const x = allocate<float>(size);
  CUTLASS_BN_CUDA(cudaMemcpy(x.get(), values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice));

  batch_norm::ChannelView const view{batch, channels, area, channels * area};
  int64_t const rows = batch * area;
  int64_t const rows_per_tile = batch_norm::choose_rows_per_tile(view, DType::kFloat32);
  int64_t const tiles = (rows + rows_per_tile - 1) / rows_per_tile;
  auto const partials = allocate<float2>(tiles * channels);
  auto const stats = allocate<float>(3 * channels);
  auto const y = allocate<float>(size);
  cudaStream_t const stream = nullptr;

  batch_norm::StatsParams moments;
  moments.x = x.get();
  moments.view = view;
  moments.rows_per_tile = rows_per_tile;
  moments.partials = partials.get();
  batch_norm::launch_stats(moments, stream);

  FinalizeParams finalize;
  finalize.partials = partials.get();
  finalize.tiles = tiles;
  finalize.channels = channels;
  finalize.rows = rows;
  finalize.rows_per_tile = rows_per_tile;
  finalize.stats = stats.get();
  launch_finalize(finalize, stream);

  batch_norm::TransformParams transform;
  transform.x = x.get();
  transform.y = y.get();
  transform.view = view;
  transform.stats = stats.get();
  batch_norm::launch_transform(transform, stream);

  CUTLASS_BN_CUDA(cudaMemcpy(values.data(), y.get(), values.size() * sizeof(float), cudaMemcpyDeviceToHost));
  double sum = 0, square = 0;
  for (int64_t n = 0; n < batch; ++n) {
    for (int64_t i = 0; i < area; ++i) {
      double const v = values[static_cast<size_t>(n * channels * area + i)];
      sum += v;
      square += v * v;
    }
  }
  double const mean = sum / double(rows), variance = square / double(rows) - mean * mean;
  std::printf("first channel of y: mean %.2e, variance %.6f\n", mean, variance);
  CUTLASS_BN_CHECK(std::abs(mean) < 1e-4 && std::abs(variance - 1) < 1e-3, "the output is not normalised");
}

}  // namespace

int main() {
  try {
    run();
  } catch (std::exception const& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
