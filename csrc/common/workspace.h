// A workspace is one allocation of the caller's that a chain of kernels shares.
#pragma once

#include "common/math.h"

namespace cutlass_bn {

// Hands out a workspace piece by piece. Of null it only counts, so that the same code says how
// large the workspace has to be.
class Workspace {
 public:
  explicit Workspace(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <class T>
  T* take(int64_t count) {
    auto* const piece = reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += round_up(count * int64_t(sizeof(T)), kAlignment);
    return piece;
  }

  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kAlignment = 256;

  char* memory_;
  int64_t bytes_ = 0;
};

}  // namespace cutlass_bn
