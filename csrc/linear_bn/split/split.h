// A float32 matrix as two fp16 planes and an exponent a row, the operands of the split GEMM (fp32
// from three fp16 products).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace cutlass_bn::linear_bn {

constexpr int kSplitShift = 12;           // lo is held times 2^12
constexpr uint32_t kLossyRow = 1u << 31;  // in the census

// x[r, k] * 2^exponent = hi + lo * 2^-12. With m the largest magnitude of row r, the exponent is 14
// - floor(log2 m), or 0 where m is 0; hi = fp16(x * 2^exponent) and lo = fp16((x * 2^exponent - hi)
// * 2^12), rounded to nearest even. That is off by 2^-23 |x| at most, or by 2^-51 m where x is some
// 2^-28 of m or less.
//
// The census says where such a small x might matter. A row is lossy if some element is off by more
// than 2^-20 of itself, or its lo is more than 2^-10 of it (the product of two lo is left out). Its
// large elements are those of 2^-12 m and more. Where two rows have more than K large elements
// together, some k is large in both (the pigeonhole principle), so that sum |x w| is at least 2^-24
// of the product of the maxima and the lossy elements' part in the error is out of sight. Where
// they don't, the product is left to the exact kernel (exact_tiles.h). So it is for a row with an
// Inf or a NaN, which counts as lossy and without large elements, its exponent and its planes as
// zeros. A row of zeros is exact whatever it meets: it counts as K large elements.
struct SplitMatrix {
  void* planes = nullptr;  // fp16 [2, rows, ld]: hi, lo; 16-byte aligned; columns [k, ld) are zero
  int32_t* exponents = nullptr;     // [rows]
  uint32_t* census = nullptr;       // [rows]: the number of large elements, plus kLossyRow
  int64_t rows = 0, k = 0, ld = 0;  // ld = split_ld(k)
};

// k rounded up to a multiple of 8, so that the planes' rows are aligned to 16 bytes.
int64_t split_ld(int64_t k);

// The float32 matrix [rows, k]. One of the strides is 1; the other is no less than the length of
// what is adjacent.
struct SplitSource {
  float const* data;
  int64_t rows, k;
  int64_t row_stride, k_stride;  // elements
};

// Bytes of scratch that launch_split needs beside the result: the maxima of the rows where k_stride
// is not 1, else none.
int64_t split_scratch_bytes(SplitSource const& source);

// One kernel where k_stride is 1, else a memset and two kernels. scratch is 16-byte aligned.
// Deterministic.
void launch_split(SplitSource const& source, SplitMatrix const& result, void* scratch,
                  cudaStream_t stream);

}  // namespace cutlass_bn::linear_bn
