// From an activation tensor to batch_norm::ChannelView.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "batch_norm/layer.h"
#include "ops/tensor_args.h"

namespace cutlass_bn::ops {

// Whether the dims in this order, outermost first, are packed without gaps. Strides of dims of size
// 1 mean nothing.
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
  if (inner > 1 && is_packed(t, contiguous))
    return batch_norm::ChannelView{t.size(0), channels, inner, channels * inner};
  if (is_packed(t, channels_last))
    return batch_norm::ChannelView{t.size(0) * inner, channels, 1, channels};
  return std::nullopt;
}

inline void check_input(Tensor const& t, char const* name) {
  check_cuda(t, name);
  CUTLASS_BN_CHECK(t.dim() >= 2, name, ": expected shape [N, C, ...], got ", shape_of(t));
}

inline batch_norm::ChannelView channel_view(Tensor const& input) {
  check_input(input, "input");
  if (auto const view = dense_view(input)) return *view;
  std::string strides;
  for (int64_t dim = 0; dim < input.dim(); ++dim)
    strides += (dim ? ", " : "") + std::to_string(input.stride(dim));
  fail("input: expected a dense tensor, contiguous or channels_last, got shape ", shape_of(input),
       " with strides [", strides, "]");
}

// Whether torch takes t's strides for those of channels_last: its memory format where both would do
// (c10's suggest_memory_format).
inline bool suggests_channels_last(Tensor const& t) {
  if ((t.dim() != 4 && t.dim() != 5) || t.stride(1) == 0) return false;
  int64_t least = 0;
  for (int64_t i = t.dim(); i > 0; --i) {  // channels, the spatial dims from the last one on, batch
    int64_t const dim = i == t.dim() ? 1 : i == 1 ? 0 : i;
    if (t.size(dim) == 0 || t.stride(dim) < least) return false;
    if (dim == 0 && least == t.stride(1)) return false;
    least = t.stride(dim) * (t.size(dim) > 1 ? t.size(dim) : 1);
  }
  return true;
}

// Of t's layout, dense, with the strides that torch would give dims of size 1.
inline Tensor empty_with_layout_of(Tensor const& t) {
  auto const sizes = t.sizes();
  bool const channels_last = suggests_channels_last(t);
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  auto const next = [&](int64_t dim) {
    strides[dim] = stride;
    stride *= sizes[dim] > 0 ? sizes[dim] : 1;
  };
  if (channels_last) next(1);
  for (int64_t dim = t.dim(); dim-- > 0;) {
    if (!channels_last || dim != 1) next(dim);
  }
  // Dense in another order: a row of channels after the other, of a rank that has no channels_last
  // in torch.
  if (!channels_last && !t.is_contiguous()) strides.assign(t.strides().begin(), t.strides().end());
  return empty_strided({sizes.begin(), sizes.end()}, {strides.data(), strides.size()},
                       t.scalar_type(), t.get_device_index());
}

// float32 [3, channels], contiguous: what batch_norm_training returns.
inline float const* stats_data(Tensor const& stats, int64_t channels, Tensor const& input) {
  check_on_device_of(stats, "stats", input);
  check_shape(stats, "stats", {3, channels});
  CUTLASS_BN_CHECK(stats.scalar_type() == ScalarType::Float && stats.is_contiguous(),
                   "stats: expected a contiguous float32 tensor, got ScalarType code ",
                   static_cast<int>(stats.scalar_type()), " with strides [", stats.stride(0), ", ",
                   stats.stride(1), "]");
  return static_cast<float const*>(stats.const_data_ptr());
}

}  // namespace cutlass_bn::ops
