// Which kernels a call takes: a Hopper GEMM with everything in its epilogue, from the operands as
// they are or from split ones, or torch.mm and the kernels around it.
#pragma once

#include <cstdint>
#include <optional>

#include "common/dtype.h"
#include "linear_bn/gemm/launch.h"
#include "linear_bn/split/chain.h"

namespace cutlass_bn::linear_bn {

// A matrix as the caller has it.
struct MatrixView {
  void const* data = nullptr;
  int64_t rows = 0, columns = 0;
  int64_t row_stride = 0, column_stride = 1;  // elements
};

// How the products of float32 operands are made. The codes are those of the ops' fp32_products.
enum class Fp32Products : int {
  kIeee = 0,   // torch.mm
  kTf32 = 1,   // operands rounded to TF32
  kSplit = 2,  // three fp16 products where they are faster than SGEMM, of which it keeps the bound
               // (docs/numerics.md)
};

struct Request {
  MatrixView x;                   // [M, K]
  MatrixView w;                   // [N, K]
  DType dtype = DType::kFloat32;  // of x and w
  int64_t out_row_stride = 0;     // elements; of u in training, of y in eval. Its data is 16-byte
                                  // aligned
  DType out_dtype = DType::kFloat32;
  Fp32Products fp32_products = Fp32Products::kIeee;
  int compute_capability = 0;  // 10 * major + minor
  int sm_count = 0;
};

enum class Path { kFused, kSplit, kPortable };

struct Plan {
  Path path = Path::kPortable;
  char const* reason = "";               // why portable; "" where it isn't
  gemm::Tile tile = gemm::Tile::kLarge;  // where not portable
  gemm::Operands operands;               // where fused
  SplitOperands split;                   // where split
};

// Depends on nothing but the request, so the same call always takes the same kernels.
Plan choose_plan(Request const& request);

// How a product a [M, K] b [K, N] of float32 matrices is made: by torch.mm, by torch.mm after one
// of the operands is transposed in memory, or by the split GEMM.
enum class ProductPath { kPlain, kTransposeA, kTransposeB, kSplit };

// Of a backward's products, whose operands lie in any order.
ProductPath choose_product(MatrixView const& a, MatrixView const& b, Fp32Products fp32_products,
                           int compute_capability);

// As the split reads it; nothing where neither of the strides is 1, or what is adjacent overlaps.
std::optional<SplitSource> split_source(MatrixView const& matrix);

}  // namespace cutlass_bn::linear_bn
