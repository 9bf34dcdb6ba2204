#include "common/check.h"
#include "common/device_info.h"

namespace cutlass_bn {
namespace {

// Compiled for the same architectures as every kernel that is launched with launch_kernel().
__global__ void probe_kernel() {}

}  // namespace

int OncePerDevice::current_device() {
  int device = 0;
  CUTLASS_BN_CUDA(cudaGetDevice(&device));
  CUTLASS_BN_CHECK(device < kMaxDevices, "device index: expected below ", kMaxDevices, ", got ",
                   device);
  return device;
}

DeviceInfo const& device_info() {
  static std::array<DeviceInfo, OncePerDevice::kMaxDevices> infos;
  static OncePerDevice once;
  int const device = OncePerDevice::current_device();
  once([device] {
    int major = 0, minor = 0;
    DeviceInfo info;
    CUTLASS_BN_CUDA(cudaDeviceGetAttribute(&info.sm_count, cudaDevAttrMultiProcessorCount, device));
    CUTLASS_BN_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    CUTLASS_BN_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    CUTLASS_BN_CUDA(cudaDeviceGetAttribute(&info.shared_bytes,
                                           cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    info.compute_capability = 10 * major + minor;
    // By the code, not the device: PTX for an older architecture runs on newer devices, but without
    // the instructions.
    cudaFuncAttributes code{};
    CUTLASS_BN_CUDA(cudaFuncGetAttributes(&code, probe_kernel));
    info.has_sm90_code = code.ptxVersion >= 90 && info.compute_capability >= 90;
    infos[device] = info;
  });
  return infos[device];
}

}  // namespace cutlass_bn
