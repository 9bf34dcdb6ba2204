// Which kernels a call takes: the Hopper GEMM with everything in its epilogue, or torch.mm and the kernels around it.
#pragma once

#include <cstdint>
#include <string>

#include "common/dtype.h"
#include "linear_bn/gemm/launch.h"

namespace cutlass_bn::linear_bn {

// A matrix as the caller has it.
struct MatrixView {
  void const* data = nullptr;
  int64_t rows = 0, columns = 0;
  int64_t row_stride = 0, column_stride = 1;  // elements
};

struct Request {
  MatrixView x;                   // [M, K]
  MatrixView w;                   // [N, K]
  DType dtype = DType::kFloat32;  // of x and w
  int64_t out_row_stride = 0;     // elements; of u in training, of y in eval. Its data is 16-byte aligned
  DType out_dtype = DType::kFloat32;
  bool allow_tf32 = false;     // whether float32 products may be rounded to TF32
  int compute_capability = 0;  // 10 * major + minor
  int sm_count = 0;
};

enum class Path { kFused, kPortable };

struct Plan {
  Path path = Path::kPortable;
  char const* reason = "";               // why not fused; "" where it is
  gemm::Tile tile = gemm::Tile::kLarge;  // where fused
  gemm::Operands operands;               // where fused
};

// Depends on nothing but the request, so the same call always takes the same kernels.
Plan choose_plan(Request const& request);

// "fused: large 128x128 tile", or "portable: " and the reason.
std::string describe(Plan const& plan);

}  // namespace cutlass_bn::linear_bn
