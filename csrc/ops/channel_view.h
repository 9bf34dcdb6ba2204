// From an activation tensor to batch_norm::ChannelView.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "batch_norm/params.h"
#include "batch_norm/resident.h"
#include "ops/tensor_args.h"

namespace cutlass_bn::ops {

// Whether the dims in this order, outermost first, are packed without gaps. Strides of dims of size 1 mean nothing.
inline bool is_packed(Tensor const& t, std::vector<int64_t> const& order) {
  int64_t expected = 1;
  for (auto dim = order.rbegin(); dim != order.rend(); ++dim) {
    if (t.size(*dim) != 1 && t.stride(*dim) != expected) return false;
    expected *= t.size(*dim);
  }
  return true;
}

// Of a tensor of two dims or more; none if it is not dense, contiguous or channels_last.
inline std::optional<batch_norm::ChannelView> dense_view(Tensor const& t) {
  int64_t const channels = t.size(1);
  if (t.numel() == 0) return batch_norm::ChannelView{0, channels, 1, channels};
  int64_t inner = 1;
  std::vector<int64_t> contiguous{0, 1}, channels_last{0};
  for (int64_t dim = 2; dim < t.dim(); ++dim) {
    inner *= t.size(dim);
    contiguous.push_back(dim);
    channels_last.push_back(dim);
  }
  channels_last.push_back(1);
  if (inner > 1 && is_packed(t, contiguous)) return batch_norm::ChannelView{t.size(0), channels, inner, channels * inner};
  if (is_packed(t, channels_last)) return batch_norm::ChannelView{t.size(0) * inner, channels, 1, channels};
  return std::nullopt;
}

inline void check_activation(Tensor const& t, char const* name) {
  check_cuda(t, name);
  CUTLASS_BN_CHECK(t.dim() >= 2, name, ": expected shape [N, C, ...], got ", shape_of(t));
}

inline batch_norm::ChannelView channel_view(Tensor const& input) {
  check_activation(input, "input");
  if (auto const view = dense_view(input)) return *view;
  std::string strides;
  for (int64_t dim = 0; dim < input.dim(); ++dim) strides += (dim ? ", " : "") + std::to_string(input.stride(dim));
  fail("input: expected a dense tensor, contiguous or channels_last, got shape ", shape_of(input), " with strides [", strides, "]");
}

inline Tensor empty_with_layout_of(Tensor const& t) {
  auto const sizes = t.sizes(), strides = t.strides();
  return empty_strided({sizes.begin(), sizes.end()}, {strides.begin(), strides.end()}, t.scalar_type(), t.get_device_index());
}

// plan_resident for tensors at these addresses.
inline std::optional<batch_norm::ResidentPlan> plan_on_chip(batch_norm::ChannelView const& view, DType dtype, bool backward,
                                                            std::initializer_list<void const*> addresses) {
  for (void const* address : addresses) {
    if (reinterpret_cast<uintptr_t>(address) % 16 != 0) return std::nullopt;
  }
  return batch_norm::plan_resident(view, dtype, backward);
}

// float32 [3, channels], contiguous: what batch_norm_training returns.
inline float const* stats_data(Tensor const& stats, int64_t channels, Tensor const& input) {
  check_on_device_of(stats, "stats", input);
  check_shape(stats, "stats", {3, channels});
  CUTLASS_BN_CHECK(stats.scalar_type() == ScalarType::Float && stats.is_contiguous(),
                   "stats: expected a contiguous float32 tensor, got ScalarType code ", static_cast<int>(stats.scalar_type()),
                   " with strides [", stats.stride(0), ", ", stats.stride(1), "]");
  return static_cast<float const*>(stats.const_data_ptr());
}

}  // namespace cutlass_bn::ops
