// What the launchers need to know of the current device.
#pragma once

#include <array>
#include <mutex>
#include <utility>

namespace cutlass_bn {

struct DeviceInfo {
  int sm_count = 0;
  int compute_capability = 0;  // 10 * major + minor
  int shared_bytes = 0;        // shared memory that a block can have
  // Whether the code that runs here is compiled for compute capability 9.0 or more: dependent
  // launches, bulk copies.
  bool has_sm90_code = false;
};

// Runs something once for each device that is current when it is called, in the process.
class OncePerDevice {
 public:
  template <class Body>
  void operator()(Body&& body) {
    std::call_once(once_[current_device()], std::forward<Body>(body));
  }

 private:
  static constexpr int kMaxDevices = 64;
  static int current_device();  // below kMaxDevices

  std::array<std::once_flag, kMaxDevices> once_;
  friend DeviceInfo const& device_info();
};

// Of the current device; read once per device and process.
DeviceInfo const& device_info();

}  // namespace cutlass_bn
