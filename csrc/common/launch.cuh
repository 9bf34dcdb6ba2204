// Kernel launches with programmatic dependent launch: on Hopper and newer the next kernel's launch overlaps this one's tail.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "common/check.h"
#include "common/device_info.h"

namespace cutlass_bn {

// Every kernel of ours calls this before its first access to global memory: it waits until the kernels before it in the stream
// have finished and their writes are visible. Without it a chain of such launches could overtake its own inputs.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream be scheduled as soon as this one's blocks leave room. It still waits as above.
__device__ __forceinline__ void allow_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

template <class... KernelArgs, class... Args>
void launch_kernel(void (*kernel)(KernelArgs...), dim3 grid, dim3 block, std::size_t shared_bytes, cudaStream_t stream,
                   Args&&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = device_info().dependent_launch ? 1 : 0;
  CUTLASS_BN_CUDA(cudaLaunchKernelEx(&config, kernel, KernelArgs(std::forward<Args>(args))...));
}

}  // namespace cutlass_bn
