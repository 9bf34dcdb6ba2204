// From run-time types and tiles to the compiled kernels.
#include <initializer_list>
#include <limits>

#include "common/device_info.h"
#include "linear_bn/gemm/instances.h"

namespace cutlass_bn::gemm {

TileShape shape_of(Tile tile) {
  switch (tile) {
    case Tile::kLarge: return {128, 128};
    case Tile::kMedium: return {64, 128};
    case Tile::kSmall: return {64, 64};
    case Tile::kSplitLarge: return {128, 128};
    case Tile::kSplitSmall: return {128, 64};
  }
  fail("unknown tile code ", static_cast<int>(tile));
}

char const* name_of(Tile tile) {
  switch (tile) {
    case Tile::kLarge: return "large 128x128";
    case Tile::kMedium: return "medium 64x128";
    case Tile::kSmall: return "small 64x64";
    case Tile::kSplitLarge: return "split large 128x128";
    case Tile::kSplitSmall: return "split small 128x64";
  }
  fail("unknown tile code ", static_cast<int>(tile));
}

namespace {

// Share of the kind's large tile's rate per multiprocessor, measured where every multiprocessor is
// busy (docs/notes/2026-11-29-fused-gemm.md).
double relative_rate(Tile tile) {
  switch (tile) {
    case Tile::kLarge: return 1.0;
    case Tile::kMedium: return 0.81;
    case Tile::kSmall: return 0.47;
    case Tile::kSplitLarge: return 1.0;
    case Tile::kSplitSmall: return 0.68;
  }
  fail("unknown tile code ", static_cast<int>(tile));
}

Tile fastest(std::initializer_list<Tile> tiles, int64_t m, int64_t n, int sm_count) {
  Tile best = *tiles.begin();
  double best_cost = std::numeric_limits<double>::infinity();
  for (Tile const tile : tiles) {
    auto const [tile_m, tile_n] = shape_of(tile);
    int64_t const count = ((m + tile_m - 1) / tile_m) * ((n + tile_n - 1) / tile_n);
    int64_t const rounds = (count + sm_count - 1) / sm_count;
    double const cost = double(rounds) * tile_m * tile_n / relative_rate(tile);
    if (cost < best_cost) {
      best = tile;
      best_cost = cost;
    }
  }
  return best;
}

}  // namespace

Tile choose_tile(int64_t m, int64_t n, int sm_count) {
  return fastest({Tile::kLarge, Tile::kMedium, Tile::kSmall}, m, n, sm_count);
}

Tile choose_split_tile(int64_t m, int64_t n, int sm_count) {
  return fastest({Tile::kSplitLarge, Tile::kSplitSmall}, m, n, sm_count);
}

char const* unsupported_reason(Operands const& o) {
  auto const rows_aligned = [&](void const* data, int64_t ld) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && ld * int64_t(size_of(o.dtype)) % 16 == 0;
  };
  if (o.m <= 0 || o.n <= 0 || o.k <= 0) return "empty matrix";
  if (o.m > kMaxDimension || o.n > kMaxDimension || o.k > kMaxDimension)
    return "a dimension of nearly 2^31 or more";
  if (!rows_aligned(o.x, o.ldx)) return "rows of input not aligned to 16 bytes";
  if (!rows_aligned(o.w, o.ldw)) return "rows of weight not aligned to 16 bytes";
  return nullptr;
}

#ifdef CUTLASS_BN_NO_GEMM  // policy.cpp asks for none

void launch_moments(MomentsParams const&, cudaStream_t) { fail("GEMM: not built"); }
void launch_inference(InferenceParams const&, cudaStream_t) { fail("GEMM: not built"); }
void launch_product(ProductParams const&, cudaStream_t) { fail("GEMM: not built"); }

#else

namespace {

// Calls run(TypeTag<Config>{}) with the tile's configuration.
template <class Run>
void dispatch_tile(Tile tile, Run&& run) {
  switch (tile) {
    case Tile::kLarge: return run(TypeTag<LargeConfig>{});
    case Tile::kMedium: return run(TypeTag<MediumConfig>{});
    case Tile::kSmall: return run(TypeTag<SmallConfig>{});
    default: fail("unknown tile code ", static_cast<int>(tile));
  }
}

template <class Run>
void dispatch_split_tile(Tile tile, Run&& run) {
  switch (tile) {
    case Tile::kSplitLarge: return run(TypeTag<SplitLargeConfig>{});
    case Tile::kSplitSmall: return run(TypeTag<SplitSmallConfig>{});
    default: fail("GEMM: expected a split tile, got ", name_of(tile));
  }
}

void check_operands(Operands const& operands, Tile tile) {
  bool const split = operands.x_exponents != nullptr && operands.w_exponents != nullptr;
  CUTLASS_BN_CHECK(split == is_split(tile), "GEMM: expected ", is_split(tile) ? "split" : "plain",
                   " operands for the tile ", name_of(tile));
  CUTLASS_BN_CHECK(!split || operands.dtype == DType::kFloat16,
                   "GEMM: expected float16 planes, got ", name_of(operands.dtype));
  char const* const reason = unsupported_reason(operands);
  CUTLASS_BN_CHECK(reason == nullptr, "GEMM: expected operands that TMA can take, got ", reason);
  CUTLASS_BN_CHECK(device_info().compute_capability == 90,
                   "GEMM: expected a GPU of compute capability 9.0, got ",
                   device_info().compute_capability / 10.0);
}

}  // namespace

void launch_moments(MomentsParams const& p, cudaStream_t stream) {
  check_operands(p.operands, p.tile);
  CUTLASS_BN_CHECK(!p.bias || (p.operands.dtype != DType::kFloat32 && !is_split(p.tile) &&
                               p.bias.dtype == p.operands.dtype),
                   "GEMM: bias: expected one of ", name_of(p.operands.dtype),
                   " for u of half precision, got ", name_of(p.bias.dtype));
  if (is_split(p.tile)) {
    return dispatch_split_tile(p.tile, [&](auto config) {
      run_split_moments<typename decltype(config)::type>(p, stream);
    });
  }
  dispatch_tile(p.tile, [&](auto config) {
    using Config = typename decltype(config)::type;
    switch (p.operands.dtype) {
      case DType::kFloat32: return run_moments<Config, DType::kFloat32>(p, stream);
      case DType::kFloat16: return run_moments<Config, DType::kFloat16>(p, stream);
      case DType::kBFloat16: return run_moments<Config, DType::kBFloat16>(p, stream);
    }
  });
}

void launch_inference(InferenceParams const& p, cudaStream_t stream) {
  check_operands(p.operands, p.tile);
  if (is_split(p.tile)) {
    CUTLASS_BN_CHECK(p.y_dtype == DType::kFloat32, "y: expected float32, got ", name_of(p.y_dtype));
    return dispatch_split_tile(p.tile, [&](auto config) {
      run_split_inference<typename decltype(config)::type>(p, stream);
    });
  }
  bool const widen = p.operands.dtype != DType::kFloat32 && p.y_dtype == DType::kFloat32;
  CUTLASS_BN_CHECK(widen || p.y_dtype == p.operands.dtype, "y: expected ",
                   name_of(p.operands.dtype), " or float32, got ", name_of(p.y_dtype));
  dispatch_tile(p.tile, [&](auto config) {
    using Config = typename decltype(config)::type;
    switch (p.operands.dtype) {
      case DType::kFloat32:
        return run_inference<Config, DType::kFloat32, DType::kFloat32>(p, stream);
      case DType::kFloat16:
        return widen ? run_inference<Config, DType::kFloat16, DType::kFloat32>(p, stream)
                     : run_inference<Config, DType::kFloat16, DType::kFloat16>(p, stream);
      case DType::kBFloat16:
        return widen ? run_inference<Config, DType::kBFloat16, DType::kFloat32>(p, stream)
                     : run_inference<Config, DType::kBFloat16, DType::kBFloat16>(p, stream);
    }
  });
}

void launch_product(ProductParams const& p, cudaStream_t stream) {
  check_operands(p.operands, p.tile);
  dispatch_split_tile(
      p.tile, [&](auto config) { run_split_product<typename decltype(config)::type>(p, stream); });
}

#endif

}  // namespace cutlass_bn::gemm
