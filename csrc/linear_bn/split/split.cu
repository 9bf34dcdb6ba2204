#include "linear_bn/split/split.h"

#include "common/check.h"
#include "common/math.h"
#include "linear_bn/split/kernels.h"

namespace cutlass_bn::linear_bn {
namespace {

void check(SplitSource const& source, SplitMatrix const& result, void const* scratch) {
  CUTLASS_BN_CHECK(source.rows >= 0 && source.k >= 0, "split: a matrix of ", source.rows, " x ",
                   source.k);
  CUTLASS_BN_CHECK(result.rows == source.rows && result.k == source.k, "split: result: expected ",
                   source.rows, " x ", source.k, ", got ", result.rows, " x ", result.k);
  CUTLASS_BN_CHECK(result.ld == split_ld(source.k), "split: result: expected ld ",
                   split_ld(source.k), ", got ", result.ld);
  if (source.rows == 0) return;
  CUTLASS_BN_CHECK(result.exponents != nullptr && is_aligned(result.exponents, 4),
                   "split: exponents: expected an address aligned to 4 bytes, got ",
                   result.exponents);
  CUTLASS_BN_CHECK(result.census != nullptr && is_aligned(result.census, 4),
                   "split: census: expected an address aligned to 4 bytes, got ", result.census);
  if (source.k == 0) return;
  CUTLASS_BN_CHECK(source.data != nullptr && is_aligned(source.data, 4),
                   "split: data: expected an address aligned to 4 bytes, got ", source.data);
  CUTLASS_BN_CHECK(result.planes != nullptr && is_aligned(result.planes, 16),
                   "split: planes: expected an address aligned to 16 bytes, got ", result.planes);
  if (source.k_stride == 1) {
    CUTLASS_BN_CHECK(source.rows == 1 || source.row_stride >= source.k,
                     "split: row_stride: expected ", source.k, " or more, got ", source.row_stride);
  } else {
    CUTLASS_BN_CHECK(source.row_stride == 1, "split: strides: expected one of them to be 1, got ",
                     source.row_stride, " and ", source.k_stride);
    CUTLASS_BN_CHECK(source.k == 1 || source.k_stride >= source.rows,
                     "split: k_stride: expected 1, or ", source.rows, " or more, got ",
                     source.k_stride);
    CUTLASS_BN_CHECK(scratch != nullptr && is_aligned(scratch, 16),
                     "split: scratch: expected an address aligned to 16 bytes, got ", scratch);
  }
}

// Whether every group of adjacent elements is whole vectors of 16 bytes.
bool is_vectorizable(float const* data, int64_t adjacent, int64_t groups, int64_t stride) {
  return is_aligned(data, 16) && adjacent % 4 == 0 && (groups == 1 || stride % 4 == 0);
}

}  // namespace

int64_t split_ld(int64_t k) { return round_up(k, 8); }

int64_t split_scratch_bytes(SplitSource const& source) {
  return source.k_stride == 1 ? 0 : source.rows * static_cast<int64_t>(sizeof(uint32_t));
}

void launch_split(SplitSource const& source, SplitMatrix const& result, void* scratch,
                  cudaStream_t stream) {
  check(source, result, scratch);
  if (source.rows == 0) return;
  if (source.k == 0) {
    CUTLASS_BN_CUDA(cudaMemsetAsync(result.exponents, 0, source.rows * sizeof(int32_t), stream));
    CUTLASS_BN_CUDA(cudaMemsetAsync(result.census, 0, source.rows * sizeof(uint32_t), stream));
  } else if (source.k_stride == 1) {
    launch_split_rows(source, result,
                      is_vectorizable(source.data, source.k, source.rows, source.row_stride),
                      stream);
  } else {
    launch_split_columns(source, result, static_cast<uint32_t*>(scratch),
                         is_vectorizable(source.data, source.rows, source.k, source.k_stride),
                         stream);
  }
}

}  // namespace cutlass_bn::linear_bn
