// From activation tensors to batch_norm::ChannelView, and copies of those that have none.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "batch_norm/layer.h"
#include "ops/tensor_args.h"

namespace cutlass_bn::ops {

// Of a tensor of two dims or more; none if it is not dense, contiguous or channels_last. Strides of
// dims of size 1 mean nothing.
inline std::optional<batch_norm::ChannelView> dense_view(Tensor const& t) {
  auto const sizes = t.sizes(), strides = t.strides();
  int64_t const outer = sizes[0], channels = sizes[1];
  bool contiguous = true, channels_last = true;
  int64_t inner = 1;
  for (std::size_t dim = sizes.size(); --dim >= 2; inner *= sizes[dim]) {
    if (sizes[dim] == 1) continue;
    contiguous = contiguous && strides[dim] == inner;
    channels_last = channels_last && strides[dim] == inner * channels;
  }
  if (outer * channels * inner == 0) return batch_norm::ChannelView{0, channels, 1, channels};
  if (channels != 1) {
    contiguous = contiguous && strides[1] == inner;
    channels_last = channels_last && strides[1] == 1;
  }
  if (outer != 1 && strides[0] != channels * inner) return std::nullopt;
  if (inner > 1 && contiguous)
    return batch_norm::ChannelView{outer, channels, inner, channels * inner};
  if (channels_last) return batch_norm::ChannelView{outer * inner, channels, 1, channels};
  return std::nullopt;
}

inline void check_input(Tensor const& t, char const* name) {
  check_cuda(t, name);
  CUTLASS_BN_CHECK(t.dim() >= 2, name, ": expected shape [N, C, ...], got ", shape_of(t));
}

// Of input's shape, dtype and device; in any layout.
inline void check_like_input(Tensor const& t, char const* name, Tensor const& input,
                             char const* input_name = "input") {
  check_on_device_of(t, name, input);
  auto const sizes = t.sizes(), expected = input.sizes();
  bool same = sizes.size() == expected.size();
  for (std::size_t dim = 0; same && dim < sizes.size(); ++dim) same = sizes[dim] == expected[dim];
  CUTLASS_BN_CHECK(same, name, ": expected shape ", shape_of(input), " like ", input_name, ", got ",
                   shape_of(t));
  DType const dtype = dtype_of(t, name), of_input = dtype_of(input, input_name);
  CUTLASS_BN_CHECK(dtype == of_input, name, ": expected ", name_of(of_input), " like ", input_name,
                   ", got ", name_of(dtype));
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

// As torch's batch norm lays out its output for an input t.
inline Tensor empty_with_layout_of(Tensor const& t) {
  auto const sizes = t.sizes();
  bool const channels_last = suggests_channels_last(t);
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  auto const next = [&](std::size_t dim) {
    strides[dim] = stride;
    stride *= sizes[dim] > 0 ? sizes[dim] : 1;
  };
  if (channels_last) next(1);
  for (std::size_t dim = sizes.size(); dim-- > 0;) {
    if (!channels_last || dim != 1) next(dim);
  }
  return empty_strided(sizes, {strides.data(), strides.size()}, t.scalar_type(),
                       t.get_device_index());
}

// A tensor and how it lies: itself where that is dense and as torch would lay out the output, else
// a copy that is. (Rows of channels are channels_last to torch in ranks 4 and 5 alone.)
struct DenseTensor {
  Tensor tensor;
  batch_norm::ChannelView view;

  explicit DenseTensor(Tensor const& t) : tensor(t) {
    auto const own = dense_view(t);
    if (own && (t.is_contiguous() || suggests_channels_last(t))) {
      view = *own;
      return;
    }
    tensor = empty_with_layout_of(t);
    torch::stable::copy_(tensor, t);
    view = *dense_view(tensor);
  }

  // t itself where it lies so too, else a copy that does.
  Tensor lay_out(Tensor const& t) const {
    auto const own = dense_view(t);
    if (own && own->outer == view.outer && own->inner == view.inner) return t;
    Tensor copy = empty_with_layout_of(tensor);
    torch::stable::copy_(copy, t);
    return copy;
  }
};

// A weight or bias of [channels] in any stride. Checked first; what the kernels take of it, which
// can be a copy, is made later.
class VectorArgument {
 public:
  VectorArgument(std::optional<Tensor> const& t, char const* name, int64_t channels,
                 Tensor const& input)
      : tensor_(t) {
    if (!t) return;
    check_on_device_of(*t, name, input);
    check_shape(*t, name, {channels});
    dtype_ = dtype_of(*t, name);
  }

  // Lives as long as this.
  ChannelVector contiguous() {
    if (!tensor_) return {};
    if (!tensor_->is_contiguous()) {
      Tensor copy = empty({tensor_->size(0)}, tensor_->scalar_type(), *tensor_);
      torch::stable::copy_(copy, *tensor_);
      tensor_ = copy;
    }
    return {tensor_->const_data_ptr(), dtype_};
  }

 private:
  std::optional<Tensor> tensor_;
  DType dtype_ = DType::kFloat32;
};

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
