// Host-side checks. Torch-free: the binding layer lets std::runtime_error surface in Python as
// RuntimeError.
#pragma once

#include <cuda_runtime.h>

#include <sstream>
#include <stdexcept>
#include <string>

namespace cutlass_bn {

template <class... Parts>
std::string message(Parts const&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

template <class... Parts>
[[noreturn]] void fail(Parts const&... parts) {
  throw std::runtime_error(message("cutlass_bn: ", parts...));
}

// A failed CUDA call. "no kernel image" means that the library has no code for this GPU: say what
// to do about it.
[[noreturn]] inline void fail_cuda(cudaError_t status, char const* call) {
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorUnsupportedPtxVersion) {
    fail(call, " failed: ", cudaGetErrorString(status),
         ". The library has no code for this GPU; rebuild it with CUTLASS_BN_ARCHITECTURES naming "
         "the GPU's compute capability.");
  }
  fail(call, " failed: ", cudaGetErrorString(status));
}

}  // namespace cutlass_bn

#define CUTLASS_BN_CHECK(condition, ...) \
  do {                                   \
    if (!(condition)) {                  \
      ::cutlass_bn::fail(__VA_ARGS__);   \
    }                                    \
  } while (0)

#define CUTLASS_BN_CUDA(call)                  \
  do {                                         \
    cudaError_t const status_ = (call);        \
    if (status_ != cudaSuccess) {              \
      (void)cudaGetLastError();                \
      ::cutlass_bn::fail_cuda(status_, #call); \
    }                                          \
  } while (0)
