// What the finalize kernels, forward and backward, share: how many channels a block takes.
#pragma once

#include <cstdint>

#include "common/launch.cuh"

namespace cutlass_bn {

inline constexpr int kFinalizeThreads = 512;

// A kernel for 32 channels a block and one for 8: few channels get narrow blocks, or there would be too few of them.
template <class Params>
void launch_finalize_kernel(void (*wide)(Params), void (*narrow)(Params), Params const& params, cudaStream_t stream) {
  bool const many = params.channels >= 32 * device_info().sm_count / 2;
  int64_t const columns = many ? 32 : 8;
  launch_kernel(many ? wide : narrow, dim3(static_cast<unsigned>((params.channels + columns - 1) / columns)),
                dim3(kFinalizeThreads), 0, stream, params);
}

}  // namespace cutlass_bn
