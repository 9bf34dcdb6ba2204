// Arithmetic of sizes and addresses.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cutlass_bn {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return ceil_div(value, multiple) * multiple;
}

inline bool is_aligned(void const* data, std::size_t bytes = 16) {
  return reinterpret_cast<std::uintptr_t>(data) % bytes == 0;
}

}  // namespace cutlass_bn
