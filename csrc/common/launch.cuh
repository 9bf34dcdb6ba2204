// Kernel launches. With programmatic dependent launch, on Hopper and newer, the next kernel's
// launch overlaps this one's tail.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "common/check.h"
#include "common/device_info.h"

namespace cutlass_bn {

// Every kernel of ours calls this before its first access to global memory: it waits until the
// kernels before it in the stream have finished and their writes are visible. Without it a chain of
// such launches could overtake its own inputs.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream be scheduled as soon as this one's blocks leave room. It still
// waits as above.
__device__ __forceinline__ void allow_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// attribute: absent where null.
template <class... KernelArgs, class... Args>
cudaError_t launch_with(cudaLaunchAttribute const* attribute, void (*kernel)(KernelArgs...),
                        dim3 grid, dim3 block, std::size_t shared_bytes, cudaStream_t stream,
                        Args&&... args) {
  cudaLaunchAttribute attributes[1];
  if (attribute != nullptr) attributes[0] = *attribute;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = attribute != nullptr ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, KernelArgs(std::forward<Args>(args))...);
}

template <class... KernelArgs, class... Args>
void launch_kernel(void (*kernel)(KernelArgs...), dim3 grid, dim3 block, std::size_t shared_bytes,
                   cudaStream_t stream, Args&&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  CUTLASS_BN_CUDA(launch_with(device_info().has_sm90_code ? &attribute : nullptr, kernel, grid,
                              block, shared_bytes, stream, std::forward<Args>(args)...));
}

// All blocks run at the same time, so that they may wait for each other. False, and nothing
// launched, where the multiprocessors that the context may use can't hold them all.
template <class... KernelArgs, class... Args>
[[nodiscard]] bool launch_cooperative_kernel(void (*kernel)(KernelArgs...), dim3 grid, dim3 block,
                                             std::size_t shared_bytes, cudaStream_t stream,
                                             Args&&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaError_t const status = launch_with(&attribute, kernel, grid, block, shared_bytes, stream,
                                         std::forward<Args>(args)...);
  if (status == cudaErrorCooperativeLaunchTooLarge) {
    (void)cudaGetLastError();
    return false;
  }
  CUTLASS_BN_CUDA(status);
  return true;
}

}  // namespace cutlass_bn
