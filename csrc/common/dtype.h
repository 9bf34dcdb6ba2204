// Element types of activations and parameters, and the one place that turns a run-time type into a
// compile-time one.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>

#include "common/check.h"

namespace cutlass_bn {

enum class DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

inline std::size_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

inline char const* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return "float32";
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
  }
  return "unknown";
}

template <class T>
struct TypeTag {
  using type = T;
};

// Calls body(TypeTag<T>{}) with T = float, __half or __nv_bfloat16.
template <class Body>
void dispatch_dtype(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kFloat32: return body(TypeTag<float>{});
    case DType::kFloat16: return body(TypeTag<__half>{});
    case DType::kBFloat16: return body(TypeTag<__nv_bfloat16>{});
  }
  fail("unknown dtype code ", static_cast<int>(dtype));
}

}  // namespace cutlass_bn
