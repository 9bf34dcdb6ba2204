#include "linear_bn/split/gemm.h"

#include <algorithm>

#include "common/check.h"
#include "linear_bn/split/exact_tiles.h"

namespace cutlass_bn::linear_bn {
namespace {

constexpr int64_t kTileRows = 128;  // of both split tiles

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

int64_t plane_bytes(int64_t rows, int64_t k) { return 2 * rows * split_ld(k) * int64_t(sizeof(uint16_t)); }

// Rows of x that are split at a time: blocks of nearly the same size, whole tiles.
int64_t block_rows(SplitSource const& x) {
  int64_t const most = std::max(kMaxPlaneBytes / plane_bytes(1, x.k) / kTileRows, int64_t{1}) * kTileRows;
  int64_t const blocks = (x.rows + most - 1) / most;
  return std::min(x.rows, round_up((x.rows + blocks - 1) / blocks, kTileRows));
}

SplitSource rows_of(SplitSource source, int64_t first, int64_t rows) {
  source.data += first * source.row_stride;
  source.rows = rows;
  return source;
}

// Hands out a workspace piece by piece; from address 0 it only counts.
class Pieces {
 public:
  explicit Pieces(void* workspace) : begin_(static_cast<char*>(workspace)) {}

  void* take(int64_t bytes) {
    void* const piece = begin_ + used_;
    used_ += round_up(bytes, 256);
    return piece;
  }

  SplitMatrix take_matrix(int64_t rows, int64_t k) {
    void* const planes = take(plane_bytes(rows, k));
    auto* const exponents = static_cast<int32_t*>(take(rows * int64_t(sizeof(int32_t))));
    auto* const census = static_cast<uint32_t*>(take(rows * int64_t(sizeof(uint32_t))));
    return {planes, exponents, census, rows, k, split_ld(k)};
  }

  int64_t used() const { return used_; }

 private:
  char* begin_;
  int64_t used_ = 0;
};

struct Workspace {
  SplitMatrix x, w;  // x: a block of rows
  void* scratch;
  int64_t bytes;

  Workspace(SplitOperands const& operands, void* memory) {
    Pieces pieces(memory);
    SplitSource const block = rows_of(operands.x, 0, block_rows(operands.x));
    x = pieces.take_matrix(block.rows, block.k);
    w = pieces.take_matrix(operands.w.rows, operands.w.k);
    scratch = pieces.take(std::max(split_scratch_bytes(block), split_scratch_bytes(operands.w)));
    bytes = pieces.used();
  }
};

// Calls launch(GEMM operands, exact problem, first row) for every block of rows of x.
template <class Launch>
void for_each_block(SplitOperands const& operands, gemm::Tile tile, void* memory, cudaStream_t stream, Launch&& launch) {
  auto const& [x, w] = operands;
  CUTLASS_BN_CHECK(x.k == w.k, "split GEMM: expected operands of the same K, got ", x.k, " and ", w.k);
  CUTLASS_BN_CHECK(gemm::is_split(tile) && gemm::shape_of(tile).m == kTileRows, "split GEMM: expected a split tile, got ",
                   gemm::name_of(tile));
  CUTLASS_BN_CHECK(x.k <= kMaxSplitK, "split GEMM: expected K of at most ", kMaxSplitK, ", got ", x.k);
  CUTLASS_BN_CHECK(memory != nullptr, "split GEMM: expected a workspace, got null");
  Workspace const workspace(operands, memory);
  launch_split(w, workspace.w, workspace.scratch, stream);
  for (int64_t first = 0; first < x.rows; first += workspace.x.rows) {
    SplitSource const block = rows_of(x, first, std::min(workspace.x.rows, x.rows - first));
    SplitMatrix planes = workspace.x;
    planes.rows = block.rows;
    launch_split(block, planes, workspace.scratch, stream);
    gemm::Operands halves;
    halves.x = planes.planes;
    halves.w = workspace.w.planes;
    halves.ldx = halves.ldw = planes.ld;
    halves.m = block.rows;
    halves.n = w.rows;
    halves.k = w.k;
    halves.dtype = DType::kFloat16;
    halves.x_plane = planes.rows * planes.ld;
    halves.w_plane = workspace.w.rows * workspace.w.ld;
    halves.x_exponents = planes.exponents;
    halves.w_exponents = workspace.w.exponents;
    ExactProblem exact;
    exact.x = {block.data, block.row_stride, block.k_stride, planes.census};
    exact.w = {w.data, w.row_stride, w.k_stride, workspace.w.census};
    exact.m = block.rows;
    exact.n = w.rows;
    exact.k = w.k;
    exact.rows_per_tile = kTileRows;
    launch(halves, exact, first);
  }
}

}  // namespace

gemm::Tile choose_split_tile(SplitOperands const& operands, int sm_count) {
  auto const& [x, w] = operands;
  auto const [tile_m, tile_n] = gemm::shape_of(gemm::Tile::kSplitLarge);
  int64_t const tiles = (x.rows + tile_m - 1) / tile_m * ((w.rows + tile_n - 1) / tile_n);
  bool const few_tiles = (tiles <= 2 * sm_count && x.k > 512) || (2 * tiles <= 7 * sm_count && x.k > 4096);
  return few_tiles ? gemm::Tile::kSplitSmall : gemm::choose_split_tile(x.rows, w.rows, sm_count);
}

int64_t split_workspace_bytes(SplitOperands const& operands) { return Workspace(operands, nullptr).bytes; }

void launch_split_moments(SplitOperands const& operands, gemm::MomentsParams p, void* workspace, cudaStream_t stream) {
  gemm::MomentsParams const all = p;
  for_each_block(operands, p.tile, workspace, stream, [&](gemm::Operands const& halves, ExactProblem const& exact, int64_t first) {
    auto* const u = static_cast<float*>(all.u) + first * all.ldu;
    p.operands = halves;
    p.u = u;
    p.partials = all.partials + first / kTileRows * operands.w.rows;
    gemm::launch_moments(p, stream);
    launch_exact(ExactMoments{exact, u, p.ldu, p.partials}, stream);
  });
}

void launch_split_inference(SplitOperands const& operands, gemm::InferenceParams p, void* workspace, cudaStream_t stream) {
  auto* const all = static_cast<float*>(p.y);
  for_each_block(operands, p.tile, workspace, stream, [&](gemm::Operands const& halves, ExactProblem const& exact, int64_t first) {
    float* const y = all + first * p.ldy;
    p.operands = halves;
    p.y = y;
    gemm::launch_inference(p, stream);
    launch_exact(
        ExactInference{exact, y, p.ldy, p.bias, p.scale, p.running_mean, p.running_var, p.gamma, p.beta, p.eps, p.activation},
        stream);
  });
}

void launch_split_product(SplitOperands const& operands, gemm::ProductParams p, void* workspace, cudaStream_t stream) {
  float* const all = p.out;
  for_each_block(operands, p.tile, workspace, stream, [&](gemm::Operands const& halves, ExactProblem const& exact, int64_t first) {
    p.operands = halves;
    p.out = all + first * p.ldo;
    gemm::launch_product(p, stream);
    launch_exact(ExactProduct{exact, p.out, p.ldo}, stream);
  });
}

}  // namespace cutlass_bn::linear_bn
