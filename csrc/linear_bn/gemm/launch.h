// The Hopper GEMM kernels: u = x W^T (+ bias) with the column moments of u (training), y =
// act(BatchNorm(scale * (x W^T + bias))) from running statistics (eval), or u alone. One kernel
// launch each, fp32 accumulation, TF32, fp16 or bf16 operands, or split ones: fp32 as two fp16
// planes (linear_bn/split/split.h), multiplied by three fp16 products.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"
#include "common/layer.h"

namespace cutlass_bn::gemm {

// CTA tiles. The first three are compiled for every operand type, the split ones for split
// operands.
enum class Tile : int {
  kLarge = 0,   // many tiles: the highest arithmetic intensity
  kMedium = 1,  // when large tiles would leave multiprocessors idle
  kSmall = 2,   // few rows
  kSplitLarge = 3,
  kSplitSmall = 4,  // when large tiles would leave multiprocessors idle; compensated sums
};

inline bool is_split(Tile tile) { return tile == Tile::kSplitLarge || tile == Tile::kSplitSmall; }

struct TileShape {
  int m, n;
};

TileShape shape_of(Tile tile);
char const* name_of(Tile tile);

// The tile that is expected to finish first; see docs/notes/2026-11-29-fused-gemm.md for the
// measurements behind it.
Tile choose_tile(int64_t m, int64_t n, int sm_count);
Tile choose_split_tile(int64_t m, int64_t n, int sm_count);

constexpr int64_t kMaxDimension = INT32_MAX - 256;  // of M, N and K: the last tile's end, too, is
                                                    // an int

struct Operands {
  void const* x = nullptr;   // [M, K], row stride ldx, 16-byte aligned
  void const* w = nullptr;   // [N, K], row stride ldw, 16-byte aligned
  int64_t ldx = 0, ldw = 0;  // elements; ld * size_of(dtype) divisible by 16
  int64_t m = 0, n = 0, k = 0;
  DType dtype = DType::kBFloat16;  // of x and w; float32 runs as TF32

  // Split operands alone: x and w are the hi planes and dtype is float16.
  int64_t x_plane = 0, w_plane = 0;      // from the hi to the lo plane, elements
  int32_t const* x_exponents = nullptr;  // [M]
  int32_t const* w_exponents = nullptr;  // [N]
};

struct MomentsParams {
  Operands operands;
  void* u = nullptr;   // [M, N] of operands.dtype (split: float32), row stride ldu, 16-byte aligned
  int64_t ldu = 0;     // elements; ldu * size_of(dtype) divisible by 16
  ChannelVector bias;  // [N] of operands.dtype, added to u before it is rounded; absent: 0. Not of
                       // float32
  float2* partials = nullptr;  // [ceil(M / shape_of(tile).m), N]: (mean, M2) of u over each tile's
                               // rows
  Tile tile = Tile::kLarge;
};

struct InferenceParams {
  Operands operands;
  void* y = nullptr;                 // [M, N] of y_dtype, row stride ldy, 16-byte aligned
  int64_t ldy = 0;                   // elements; ldy * size_of(y_dtype) divisible by 16
  DType y_dtype = DType::kBFloat16;  // operands.dtype (not if split) or float32
  Layer layer;                       // vectors of [N]
  Tile tile = Tile::kLarge;
};

// u = x W^T of split operands.
struct ProductParams {
  Operands operands;
  float* out = nullptr;  // [M, N], row stride ldo, 16-byte aligned
  int64_t ldo = 0;       // elements; a multiple of 4
  Tile tile = Tile::kSplitLarge;
};

// Null where the kernels can take these operands (layouts, alignment, sizes), else the reason, a
// static string.
char const* unsupported_reason(Operands const& operands);

void launch_moments(MomentsParams const& params, cudaStream_t stream);
void launch_inference(InferenceParams const& params, cudaStream_t stream);
void launch_product(ProductParams const& params, cudaStream_t stream);

}  // namespace cutlass_bn::gemm
