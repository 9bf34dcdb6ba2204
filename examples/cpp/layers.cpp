// Both layers without torch, one call a pass: BatchNorm of a random [N, C, H, W] activation, and
// Linear + BatchNorm1d + ReLU in bfloat16. The outputs' means and variances are checked.
#include <cuda_bf16.h>
#include <cutlass_bn/batch_norm/layer.h>
#include <cutlass_bn/common/device_info.h>
#include <cutlass_bn/linear_bn/layer.h>
#include <cutlass_bn/linear_bn/normalize.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <random>
#include <vector>

namespace {

using namespace cutlass_bn;

template <class T>
struct CudaFree {
  void operator()(T* p) const { cudaFree(p); }
};

template <class T>
using DeviceArray = std::unique_ptr<T[], CudaFree<T>>;

template <class T>
DeviceArray<T> allocate(int64_t count) {
  void* p = nullptr;
  CUTLASS_BN_CUDA(cudaMalloc(&p, static_cast<size_t>(count) * sizeof(T)));
  return DeviceArray<T>(static_cast<T*>(p));
}

template <class T>
DeviceArray<T> random_normal(int64_t count, float mean, float std, int seed) {
  std::mt19937 generator(static_cast<unsigned>(seed));
  std::normal_distribution<float> normal(mean, std);
  std::vector<T> values(static_cast<size_t>(count));
  for (T& v : values) v = T(normal(generator));
  auto device = allocate<T>(count);
  CUTLASS_BN_CUDA(
      cudaMemcpy(device.get(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return device;
}

template <class T>
std::vector<T> on_host(DeviceArray<T> const& device, int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  CUTLASS_BN_CUDA(
      cudaMemcpy(values.data(), device.get(), values.size() * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

void check_moments(char const* what, std::vector<float> const& values, double tolerance) {
  double sum = 0, square = 0;
  for (float v : values) sum += v, square += double(v) * v;
  double const mean = sum / double(values.size()),
               variance = square / double(values.size()) - mean * mean;
  std::printf("%s: mean %.2e, variance %.6f\n", what, mean, variance);
  CUTLASS_BN_CHECK(std::abs(mean) < tolerance && std::abs(variance - 1) < 10 * tolerance,
                   "the output is not normalised");
}

void run_batch_norm() {
  int64_t const batch = 16, channels = 64, area = 56 * 56, size = batch * channels * area;
  auto const x = random_normal<float>(size, 100.f, 3.f, 0);
  auto const y = allocate<float>(size), stats = allocate<float>(3 * channels);

  auto const plan = batch_norm::plan_forward({batch, channels, area, channels * area},
                                             DType::kFloat32, true);
  auto const workspace = allocate<char>(plan.workspace_bytes);
  batch_norm::ForwardParams params;
  params.x = x.get();
  params.y = y.get();
  params.finalize.stats = stats.get();
  batch_norm::launch_forward(plan, params, workspace.get(), nullptr);

  std::vector<float> first_channel;
  auto const values = on_host(y, size);
  for (int64_t n = 0; n < batch; ++n) {
    auto const begin = values.begin() + n * channels * area;
    first_channel.insert(first_channel.end(), begin, begin + area);
  }
  std::printf("BatchNorm %s: ", plan.on_chip ? "on chip" : "in two passes");
  check_moments("first channel of y", first_channel, 1e-4);
}

void run_linear_batch_norm() {
  using Half = __nv_bfloat16;
  DeviceInfo const& device = device_info();
  int64_t const m = 4096, n = 512, k = 256;
  auto const x = random_normal<Half>(m * k, 0.f, 1.f, 1),
             w = random_normal<Half>(n * k, 0.f, 1.f / 16, 2);
  auto const u = allocate<Half>(m * n), y = allocate<Half>(m * n);
  auto const stats = allocate<float>(3 * n);

  linear_bn::Request request;
  request.x = {x.get(), m, k, k, 1};
  request.w = {w.get(), n, k, k, 1};
  request.dtype = request.out_dtype = DType::kBFloat16;
  request.out_row_stride = n;
  request.compute_capability = device.compute_capability;
  request.sm_count = device.sm_count;
  auto const plan = linear_bn::plan_training(request);
  if (plan.product.path == linear_bn::Path::kPortable) {
    std::printf("Linear + BatchNorm1d: left out, %s\n", plan.product.reason);
    return;
  }
  auto const workspace = allocate<char>(plan.workspace_bytes);
  linear_bn::TrainingParams training;
  training.u = u.get();
  training.ldu = n;
  training.y = y.get();
  training.ldy = n;
  training.y_dtype = DType::kBFloat16;
  training.finalize.stats = stats.get();
  linear_bn::launch_training(plan, training, workspace.get(), {}, nullptr);

  std::vector<float> first_column;
  auto const values = on_host(y, m * n);
  for (int64_t row = 0; row < m; ++row)
    first_column.push_back(float(values[static_cast<size_t>(row * n)]));
  std::printf("Linear + BatchNorm1d: ");
  check_moments("first column of y", first_column, 1e-3);
}

}  // namespace

int main() {
  try {
    run_batch_norm();
    run_linear_batch_norm();
  } catch (std::exception const& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
