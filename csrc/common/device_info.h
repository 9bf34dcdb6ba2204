// What the launchers need to know of the current device.
#pragma once

namespace cutlass_bn {

struct DeviceInfo {
  int sm_count = 0;
  int compute_capability = 0;  // 10 * major + minor
  int shared_bytes = 0;        // shared memory that a block can have
  // Whether the code that runs here is compiled for compute capability 9.0 or more: dependent launches, bulk copies.
  bool has_sm90_code = false;
};

// Of the current device; read once per device and process.
DeviceInfo const& device_info();

}  // namespace cutlass_bn
