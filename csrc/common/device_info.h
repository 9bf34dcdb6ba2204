// What the launchers need to know of the current device.
#pragma once

namespace cutlass_bn {

struct DeviceInfo {
  int sm_count = 0;
  int compute_capability = 0;     // 10 * major + minor
  bool dependent_launch = false;  // whether the code that runs here has wait_for_previous_kernel()
};

// Of the current device; read once per device and process.
DeviceInfo const& device_info();

}  // namespace cutlass_bn
