#include "linear_bn/split/chain.h"

#include <algorithm>

#include "common/check.h"
#include "common/device_info.h"
#include "common/workspace.h"
#include "linear_bn/split/exact_tiles.h"

namespace cutlass_bn::linear_bn {
namespace {

constexpr int64_t kTileRows = 128;  // of both split tiles

int64_t plane_bytes(int64_t rows, int64_t k) {
  return 2 * rows * split_ld(k) * int64_t(sizeof(uint16_t));
}

// Rows of the one operand that are split at a time: blocks of nearly the same size, whole tiles.
int64_t block_rows(SplitSource const& blocked, SplitSource const& whole, int64_t max_bytes) {
  auto const tiles_within = [&](int64_t bytes) {
    return bytes / (plane_bytes(1, blocked.k) * kTileRows);
  };
  int64_t const tiles_of_whole = ceil_div(whole.rows, kTileRows),
                busy = ceil_div(device_info().sm_count, tiles_of_whole);
  int64_t const tiles = std::max(
      {tiles_within(max_bytes), std::min(busy, tiles_within(kMaxPlaneBytes)), int64_t{1}});
  int64_t const blocks = ceil_div(blocked.rows, tiles * kTileRows);
  return std::min(blocked.rows, round_up(ceil_div(blocked.rows, blocks), kTileRows));
}

SplitSource rows_of(SplitSource source, int64_t first, int64_t rows) {
  source.data += first * source.row_stride;
  source.rows = rows;
  return source;
}

SplitMatrix take_matrix(Workspace& workspace, int64_t rows, int64_t k) {
  void* const planes = workspace.take<char>(plane_bytes(rows, k));
  auto* const exponents = workspace.take<int32_t>(rows);
  auto* const census = workspace.take<uint32_t>(rows);
  return {planes, exponents, census, rows, k, split_ld(k)};
}

// The operand that is taken by blocks, and the other.
SplitSource const& blocked_of(SplitOperands const& o) { return o.w_in_blocks ? o.w : o.x; }
SplitSource const& whole_of(SplitOperands const& o) { return o.w_in_blocks ? o.x : o.w; }

struct SplitWorkspace {
  SplitMatrix block, whole;
  void* scratch;
  int64_t bytes;

  SplitWorkspace(SplitOperands const& operands, void* memory) {
    Workspace pieces(memory);
    SplitSource const& all = whole_of(operands);
    SplitSource const rows = rows_of(
        blocked_of(operands), 0, block_rows(blocked_of(operands), all, operands.max_plane_bytes));
    block = take_matrix(pieces, rows.rows, rows.k);
    whole = take_matrix(pieces, all.rows, all.k);
    scratch = pieces.take<char>(std::max(split_scratch_bytes(rows), split_scratch_bytes(all)));
    bytes = pieces.bytes();
  }
};

gemm::Operands operands_of(SplitMatrix const& x, SplitMatrix const& w) {
  gemm::Operands halves;
  halves.x = x.planes;
  halves.w = w.planes;
  halves.ldx = x.ld;
  halves.ldw = w.ld;
  halves.m = x.rows;
  halves.n = w.rows;
  halves.k = x.k;
  halves.dtype = DType::kFloat16;
  halves.x_plane = x.rows * x.ld;
  halves.w_plane = w.rows * w.ld;
  halves.x_exponents = x.exponents;
  halves.w_exponents = w.exponents;
  return halves;
}

ExactOperand exact_of(SplitSource const& source, SplitMatrix const& split) {
  return {source.data, source.row_stride, source.k_stride, split.census};
}

// Calls launch(GEMM operands, exact problem, first row of the blocked operand) for every block of
// it.
template <class Launch>
void for_each_block(SplitOperands const& operands, gemm::Tile tile, void* memory,
                    cudaStream_t stream, Launch&& launch) {
  SplitSource const &blocked = blocked_of(operands), &all = whole_of(operands);
  CUTLASS_BN_CHECK(blocked.k == all.k, "split GEMM: expected operands of the same K, got ",
                   operands.x.k, " and ", operands.w.k);
  CUTLASS_BN_CHECK(gemm::is_split(tile) && gemm::shape_of(tile).m == kTileRows,
                   "split GEMM: expected a split tile, got ", gemm::name_of(tile));
  CUTLASS_BN_CHECK(all.k <= kMaxSplitK, "split GEMM: expected K of at most ", kMaxSplitK, ", got ",
                   all.k);
  CUTLASS_BN_CHECK(memory != nullptr, "split GEMM: expected a workspace, got null");
  SplitWorkspace const workspace(operands, memory);
  SplitMatrix const& whole = workspace.whole;
  launch_split(all, whole, workspace.scratch, stream);
  for (int64_t first = 0; first < blocked.rows; first += workspace.block.rows) {
    SplitSource const rows = rows_of(blocked, first,
                                     std::min(workspace.block.rows, blocked.rows - first));
    SplitMatrix block = workspace.block;
    block.rows = rows.rows;
    launch_split(rows, block, workspace.scratch, stream);
    bool const swapped = operands.w_in_blocks;
    ExactProblem exact;
    exact.x = swapped ? exact_of(all, whole) : exact_of(rows, block);
    exact.w = swapped ? exact_of(rows, block) : exact_of(all, whole);
    exact.m = swapped ? all.rows : rows.rows;
    exact.n = swapped ? rows.rows : all.rows;
    exact.k = all.k;
    exact.rows_per_tile = kTileRows;
    launch(swapped ? operands_of(whole, block) : operands_of(block, whole), exact, first);
  }
}

// Of the launchers whose epilogue takes whole rows of w.
void check_blocks_of_x(SplitOperands const& operands) {
  CUTLASS_BN_CHECK(
      !operands.w_in_blocks,
      "split GEMM: w_in_blocks: expected false, as only launch_split_product takes w in blocks");
}

}  // namespace

gemm::Tile choose_split_tile(SplitOperands const& operands, int sm_count) {
  SplitSource const &x = operands.x, &w = operands.w;
  auto const [tile_m, tile_n] = gemm::shape_of(gemm::Tile::kSplitLarge);
  int64_t const tiles = (x.rows + tile_m - 1) / tile_m * ((w.rows + tile_n - 1) / tile_n);
  bool const few_tiles = (tiles <= 2 * sm_count && x.k > 512) ||
                         (2 * tiles <= 7 * sm_count && x.k > 4096);
  return few_tiles ? gemm::Tile::kSplitSmall : gemm::choose_split_tile(x.rows, w.rows, sm_count);
}

int64_t split_workspace_bytes(SplitOperands const& operands) {
  return SplitWorkspace(operands, nullptr).bytes;
}

void launch_split_moments(SplitOperands const& operands, gemm::MomentsParams p, void* workspace,
                          cudaStream_t stream) {
  check_blocks_of_x(operands);
  gemm::MomentsParams const all = p;
  for_each_block(operands, p.tile, workspace, stream,
                 [&](gemm::Operands const& halves, ExactProblem const& exact, int64_t first) {
                   auto* const u = static_cast<float*>(all.u) + first * all.ldu;
                   p.operands = halves;
                   p.u = u;
                   p.partials = all.partials + first / kTileRows * operands.w.rows;
                   gemm::launch_moments(p, stream);
                   launch_exact(ExactMoments{exact, u, p.ldu, p.partials}, stream);
                 });
}

void launch_split_inference(SplitOperands const& operands, gemm::InferenceParams p, void* workspace,
                            cudaStream_t stream) {
  check_blocks_of_x(operands);
  auto* const all = static_cast<float*>(p.y);
  for_each_block(operands, p.tile, workspace, stream,
                 [&](gemm::Operands const& halves, ExactProblem const& exact, int64_t first) {
                   float* const y = all + first * p.ldy;
                   p.operands = halves;
                   p.y = y;
                   gemm::launch_inference(p, stream);
                   launch_exact(ExactInference{exact, y, p.ldy, p.layer}, stream);
                 });
}

void launch_split_product(SplitOperands const& operands, gemm::ProductParams p, void* workspace,
                          cudaStream_t stream) {
  float* const all = p.out;
  int64_t const step = operands.w_in_blocks ? 1 : p.ldo;
  for_each_block(operands, p.tile, workspace, stream,
                 [&](gemm::Operands const& halves, ExactProblem const& exact, int64_t first) {
                   p.operands = halves;
                   p.out = all + first * step;
                   gemm::launch_product(p, stream);
                   launch_exact(ExactProduct{exact, p.out, p.ldo}, stream);
                 });
}

}  // namespace cutlass_bn::linear_bn
