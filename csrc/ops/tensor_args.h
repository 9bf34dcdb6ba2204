// From torch tensors to what the launchers take: checks whose messages name the argument, what was
// expected and what came.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "common/activation.h"
#include "common/channel_vector.h"
#include "common/check.h"
#include "common/dtype.h"
#include "common/finalize.h"
#include "common/math.h"

// Weak: a CPU-only libtorch does not have them, and the library has to load there too (for the
// schemas).
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace cutlass_bn::ops {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::string shape_of(Tensor const& t) {
  std::string text = "[";
  for (int64_t i = 0; i < t.dim(); ++i) text += (i ? ", " : "") + std::to_string(t.size(i));
  return text + "]";
}

inline std::string device_of(Tensor const& t) {
  return t.is_cuda() ? "cuda:" + std::to_string(t.get_device_index())
                     : std::string("a device that is not CUDA");
}

inline DType dtype_of(ScalarType type, char const* name) {
  switch (type) {
    case ScalarType::Float: return DType::kFloat32;
    case ScalarType::Half: return DType::kFloat16;
    case ScalarType::BFloat16: return DType::kBFloat16;
    default:
      fail(name, ": expected float32, float16 or bfloat16, got ScalarType code ",
           static_cast<int>(type));
  }
}

inline DType dtype_of(Tensor const& t, char const* name) { return dtype_of(t.scalar_type(), name); }

inline ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return ScalarType::Half;
    case DType::kBFloat16: return ScalarType::BFloat16;
    default: return ScalarType::Float;
  }
}

inline Activation activation_of(int64_t code) {
  CUTLASS_BN_CHECK(code >= 0 && code <= static_cast<int64_t>(Activation::kLeakyRelu),
                   "activation: expected 0 (none), 1 (relu), 2 (gelu), 3 (silu) or 4 (leaky_relu), "
                   "got ",
                   code);
  return static_cast<Activation>(code);
}

inline void check_on_device_of(Tensor const& t, char const* name, Tensor const& input) {
  CUTLASS_BN_CHECK(t.is_cuda() && t.get_device_index() == input.get_device_index(), name,
                   ": expected a tensor on ", device_of(input), " like input, got one on ",
                   device_of(t));
}

inline void check_cuda(Tensor const& t, char const* name) {
  CUTLASS_BN_CHECK(t.is_cuda(), name, ": expected a CUDA tensor, got one on ", device_of(t));
}

inline void check_shape(Tensor const& t, char const* name,
                        std::initializer_list<int64_t> expected) {
  bool same = t.dim() == static_cast<int64_t>(expected.size());
  int64_t i = 0;
  for (int64_t const size : expected) same = same && t.size(i++) == size;
  if (same) return;
  std::string text;
  for (int64_t const size : expected) text += (text.empty() ? "" : ", ") + std::to_string(size);
  fail(name, ": expected shape [", text, "], got ", shape_of(t));
}

// [channels], contiguous, on input's device.
inline ChannelVector channel_vector(Tensor const& t, char const* name, int64_t channels,
                                    Tensor const& input) {
  check_on_device_of(t, name, input);
  check_shape(t, name, {channels});
  CUTLASS_BN_CHECK(t.is_contiguous(), name, ": expected a contiguous tensor, got stride ",
                   t.stride(0));
  return {t.const_data_ptr(), dtype_of(t, name)};
}

inline ChannelVector channel_vector(std::optional<Tensor> const& t, char const* name,
                                    int64_t channels, Tensor const& input) {
  return t ? channel_vector(*t, name, channels, input) : ChannelVector{};
}

inline MutableChannelVector mutable_channel_vector(std::optional<Tensor> const& t, char const* name,
                                                   int64_t channels, Tensor const& input) {
  if (!t) return {};
  ChannelVector const v = channel_vector(*t, name, channels, input);
  return {t->mutable_data_ptr(), v.dtype};
}

// The running statistics come together or not at all, and a cumulative average with its counter.
inline void set_running(FinalizeParams& finalize, std::optional<Tensor> const& mean,
                        std::optional<Tensor> const& var,
                        std::optional<Tensor> const& num_batches_tracked,
                        std::optional<double> momentum, int64_t channels, Tensor const& input) {
  CUTLASS_BN_CHECK(mean.has_value() == var.has_value(),
                   "running_mean and running_var: expected both or neither, got only ",
                   mean ? "running_mean" : "running_var");
  finalize.running_mean = mutable_channel_vector(mean, "running_mean", channels, input);
  finalize.running_var = mutable_channel_vector(var, "running_var", channels, input);
  if (num_batches_tracked) {
    check_on_device_of(*num_batches_tracked, "num_batches_tracked", input);
    CUTLASS_BN_CHECK(
        num_batches_tracked->scalar_type() == ScalarType::Long && num_batches_tracked->numel() == 1,
        "num_batches_tracked: expected one int64, got ", num_batches_tracked->numel(),
        " elements of ScalarType code ", static_cast<int>(num_batches_tracked->scalar_type()));
    finalize.num_batches_tracked = static_cast<int64_t*>(num_batches_tracked->mutable_data_ptr());
  }
  CUTLASS_BN_CHECK(
      momentum || !mean || num_batches_tracked,
      "momentum: expected a number, or num_batches_tracked for a cumulative average, got neither");
  finalize.momentum = momentum.value_or(0.0);
  finalize.cumulative = !momentum && num_batches_tracked;
}

inline Tensor empty_strided(IntHeaderOnlyArrayRef sizes, IntHeaderOnlyArrayRef strides,
                            ScalarType dtype, int32_t device_index) {
  AtenTensorHandle handle = nullptr;
  CUTLASS_BN_CHECK(aoti_torch_empty_strided(
                       static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                       static_cast<int32_t>(dtype) /* c10's code */, aoti_torch_device_type_cuda(),
                       device_index, &handle) == AOTI_TORCH_SUCCESS,
                   "could not allocate a tensor (out of memory?)");
  return Tensor(handle);
}

// Elements of t from its first on, in other sizes and strides. Not a view to autograd.
inline Tensor with_strides(Tensor const& t, IntHeaderOnlyArrayRef sizes,
                           IntHeaderOnlyArrayRef strides) {
  AtenTensorHandle handle = nullptr;
  CUTLASS_BN_CHECK(
      aoti_torch__reinterpret_tensor(t.get(), static_cast<int64_t>(sizes.size()), sizes.data(),
                                     strides.data(), 0, &handle) == AOTI_TORCH_SUCCESS,
      "torch could not make a tensor of another's memory");
  return Tensor(handle);
}

// Contiguous, on input's device.
template <std::size_t kRank>
Tensor empty(int64_t const (&sizes)[kRank], ScalarType dtype, Tensor const& input) {
  std::array<int64_t, kRank> strides;
  int64_t stride = 1;
  for (std::size_t i = kRank; i-- > 0;) {
    strides[i] = stride;
    stride *= sizes[i] > 0 ? sizes[i] : 1;
  }
  return empty_strided(sizes, strides, dtype, input.get_device_index());
}

inline void fill_with_zeros(Tensor const& t, cudaStream_t stream) {
  auto const bytes = static_cast<std::size_t>(t.numel()) * size_of(dtype_of(t, "result"));
  if (bytes > 0) CUTLASS_BN_CUDA(cudaMemsetAsync(t.mutable_data_ptr(), 0, bytes, stream));
}

// A gradient of [n] in the dtype that it is asked for in; none: not asked for, and the tensor is
// empty.
struct VectorGradient {
  Tensor tensor;
  MutableChannelVector vector;

  VectorGradient(std::optional<ScalarType> dtype, int64_t n, Tensor const& like)
      : tensor(empty({dtype ? n : 0}, dtype.value_or(ScalarType::Float), like)) {
    if (dtype) vector = {tensor.mutable_data_ptr(), dtype_of(*dtype, "gradient")};
  }
};

// Of a plan; null where it needs none.
class WorkspaceMemory {
 public:
  WorkspaceMemory(int64_t bytes, Tensor const& input) {
    if (bytes > 0) tensor_ = empty({bytes}, ScalarType::Byte, input);
  }
  void* data() const { return tensor_ ? tensor_->mutable_data_ptr() : nullptr; }

 private:
  std::optional<Tensor> tensor_;
};

inline cudaStream_t current_stream(Tensor const& input) {
  void* stream = nullptr;
  CUTLASS_BN_CHECK(aoti_torch_get_current_cuda_stream != nullptr,
                   "this torch has no CUDA support, yet input is on ", device_of(input));
  CUTLASS_BN_CHECK(
      aoti_torch_get_current_cuda_stream(input.get_device_index(), &stream) == AOTI_TORCH_SUCCESS,
      "torch gave no current CUDA stream for ", device_of(input));
  return static_cast<cudaStream_t>(stream);
}

}  // namespace cutlass_bn::ops
