// The Hopper GEMM kernels: u = x W^T with the column moments of u (training), or y = act(BatchNorm(scale * (x W^T + bias))) from
// running statistics (eval). One kernel launch each, TF32, fp16 or bf16 operands, fp32 accumulation.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/activation.h"
#include "common/channel_vector.h"
#include "common/dtype.h"

namespace cutlass_bn::gemm {

// CTA tile shapes that are compiled for every operand type.
enum class Tile : int {
  kLarge = 0,   // many tiles: the highest arithmetic intensity
  kMedium = 1,  // when large tiles would leave multiprocessors idle
  kSmall = 2,   // few rows
};

struct TileShape {
  int m, n;
};

TileShape shape_of(Tile tile);
char const* name_of(Tile tile);

// The tile that is expected to finish first; see docs/performance.md for the measurements behind it.
Tile choose_tile(int64_t m, int64_t n, int sm_count);

struct Operands {
  void const* x = nullptr;   // [M, K], row stride ldx, 16-byte aligned
  void const* w = nullptr;   // [N, K], row stride ldw, 16-byte aligned
  int64_t ldx = 0, ldw = 0;  // elements; ld * size_of(dtype) divisible by 16
  int64_t m = 0, n = 0, k = 0;
  DType dtype = DType::kBFloat16;  // of x and w; float32 runs as TF32
};

// Which multiprocessors run the tiles, and in which order. The defaults are the fastest measured.
struct Schedule {
  int sm_count = 0;      // multiprocessors to use; 0: all
  bool along_m = false;  // consecutive tiles go down the rows, else along the columns
  int max_swizzle = 8;   // tiles across the other direction that are kept together for L2
};

struct MomentsParams {
  Operands operands;
  void* u = nullptr;           // [M, N] of operands.dtype, row stride ldu, 16-byte aligned
  int64_t ldu = 0;             // elements; ldu * size_of(dtype) divisible by 16
  float2* partials = nullptr;  // [ceil(M / shape_of(tile).m), N]: (mean, M2) of u over each tile's rows
  Tile tile = Tile::kLarge;
  Schedule schedule;
};

struct InferenceParams {
  Operands operands;
  void* y = nullptr;                        // [M, N] of y_dtype, row stride ldy, 16-byte aligned
  int64_t ldy = 0;                          // elements; ldy * size_of(y_dtype) divisible by 16
  DType y_dtype = DType::kBFloat16;         // operands.dtype or float32
  ChannelVector bias, scale;                // [N]; absent: 0, 1
  ChannelVector running_mean, running_var;  // [N]
  ChannelVector gamma, beta;                // [N]; absent: 1, 0
  float eps = 1e-5f;
  Activation activation = Activation::kNone;
  Tile tile = Tile::kLarge;
  Schedule schedule;
};

// Null where the kernels can take these operands (layouts, alignment, sizes), else the reason, a static string.
char const* unsupported_reason(Operands const& operands);

void launch_moments(MomentsParams const& params, cudaStream_t stream);
void launch_inference(InferenceParams const& params, cudaStream_t stream);

}  // namespace cutlass_bn::gemm
