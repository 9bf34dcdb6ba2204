// The split GEMM from float32 operands on: both are split into fp16 planes, multiplied by three
// fp16 products (gemm/launch.h), and what the planes can't hold is recomputed exactly
// (exact_tiles.h). No synchronisation.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "linear_bn/gemm/launch.h"
#include "linear_bn/split/split.h"

namespace cutlass_bn::linear_bn {

constexpr int64_t kMaxPlaneBytes = int64_t{1} << 28;

// One operand's planes are whole in the workspace. The other is taken by blocks of rows, one after
// the other in the same memory, whose planes have at most max_plane_bytes; up to kMaxPlaneBytes
// where smaller ones would leave multiprocessors idle; and those of one tile's rows in any case.
struct SplitOperands {
  SplitSource x;             // [M, K]
  SplitSource w;             // [N, K]
  bool w_in_blocks = false;  // else x is; for launch_split_product alone
  int64_t max_plane_bytes = kMaxPlaneBytes;
};

constexpr int64_t kMaxSplitK = (int64_t{1} << 30) - 1;

// The compensated tile where cuBLAS is likely to split a long K over idle multiprocessors, which
// makes its sums, too, more exact (docs/notes/2026-11-29-split-fp32.md); otherwise the faster one.
gemm::Tile choose_split_tile(SplitOperands const& operands, int sm_count);

// Bytes of workspace: planes, exponents and census of one operand and of a block of the other, and
// the scratch of their splits.
int64_t split_workspace_bytes(SplitOperands const& operands);

// params as the launchers of gemm/launch.h take them, with a split tile; their operands are filled
// in here. workspace: of split_workspace_bytes(), 16-byte aligned.
void launch_split_moments(SplitOperands const& operands, gemm::MomentsParams params,
                          void* workspace, cudaStream_t stream);
void launch_split_inference(SplitOperands const& operands, gemm::InferenceParams params,
                            void* workspace, cudaStream_t stream);
void launch_split_product(SplitOperands const& operands, gemm::ProductParams params,
                          void* workspace, cudaStream_t stream);

}  // namespace cutlass_bn::linear_bn
