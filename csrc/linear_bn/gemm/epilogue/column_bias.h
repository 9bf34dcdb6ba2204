// Epilogue visitor: adds the Linear layer's bias to the accumulator before it is rounded to half
// precision. A bias that takes a large mean away has to do so first: the mean's rounding would
// stay. Rows past M get none, as a merge with no rows relies on zeros there.
#pragma once

#include "cute/tensor.hpp"

#include "linear_bn/gemm/epilogue/accumulator_order.h"
#include "linear_bn/gemm/epilogue/node.h"

namespace cutlass_bn::gemm {

// For a ping-pong kernel, whose warpgroups store in turn: the first one to do so fetches all of the
// bias, for both and for all tiles of the CTA. Where the CTA has no more than a tile for each, or
// the bias is longer than kHeld, it comes tile by tile, which costs its latency each time.
//
// Element: of the bias. Warps: those of a warpgroup.
template <class TileShape, class Element, int Warps>
struct ColumnBias : EpilogueNode {
  static constexpr int kTileM = cute::size<0>(TileShape{});
  static constexpr int kTileN = cute::size<1>(TileShape{});
  static constexpr int kHeld = 4096;

  struct SharedStorage {
    alignas(16) Element bias[kHeld];
  };

  struct Arguments {
    Element const* bias = nullptr;  // [N]; null: 0
  };
  using Params = Arguments;

  CUTLASS_HOST_DEVICE ColumnBias() {}
  CUTLASS_HOST_DEVICE ColumnBias(Params const& params, SharedStorage const& shared)
      : params(params), shared(const_cast<SharedStorage*>(&shared)) {}

  Params params;
  SharedStorage* shared = nullptr;
  bool is_first_tile = true;  // of this warpgroup

  // SubtileColumns: width of an epilogue subtile.
  template <int SubtileColumns>
  struct Callbacks : cutlass::epilogue::fusion::EmptyConsumerStoreCallbacks {
    Element const* vector;  // what is to be fetched, `columns` of it; null: no bias
    Element* fetched;
    Element const* held;  // at the tile's first column
    int columns;
    bool fetches;
    int rows;  // of the tile inside the matrix
    int thread;
    float bias[SubtileColumns / 4] = {};  // of this thread's columns, two of every eight
    float inside[2] = {};  // 1 for each of its two rows that is in the matrix, else 0

    CUTLASS_DEVICE Callbacks(Element const* vector, Element* fetched, Element const* held,
                             int columns, bool fetches, int rows, int thread)
        : vector(vector),
          fetched(fetched),
          held(held),
          columns(columns),
          fetches(fetches),
          rows(rows),
          thread(thread) {}

    // The last subtile's barriers keep these writes behind the previous tile's reads.
    CUTLASS_DEVICE void begin() {
      if (!fetches) return;
#pragma unroll 8
      for (int column = thread; column < columns; column += Warps * 32) {
        fetched[column] = vector[column];
      }
    }
    CUTLASS_DEVICE bool begin_sync_needed() const { return fetches; }

    // Subtiles go down the rows first, so a subtile's columns serve all of them. What is read past
    // N is not stored.
    CUTLASS_DEVICE void begin_loop(int epi_m, int epi_n) {
      if (vector == nullptr) return;
      int const first_row = (epi_m * Warps + thread / 32) * 16 + thread % 32 / 4;
      inside[0] = first_row < rows ? 1.f : 0.f;
      inside[1] = first_row + 8 < rows ? 1.f : 0.f;
      if (epi_m != 0) return;
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < SubtileColumns / 4; ++c) {
        int const column = column_of_value(c / 2 * 4 + c % 2, thread);
        bias[c] = float(held[epi_n * SubtileColumns + column]);
      }
    }

    template <class Accumulator, int FragmentSize>
    CUTLASS_DEVICE auto visit(cutlass::Array<Accumulator, FragmentSize> const&, int epi_v, int, int,
                              cutlass::Array<float, FragmentSize> const& input) {
      if (vector == nullptr) return input;
      cutlass::Array<float, FragmentSize> sum;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < FragmentSize; ++i) {
        int const value = epi_v * FragmentSize + i;
        sum[i] = fmaf(inside[value / 2 % 2], bias[value / 4 * 2 + value % 2], input[i]);
      }
      return sum;
    }
  };

  template <bool ReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    using namespace cute;
    using Layout = decltype(args.tCcD.layout());
    static_assert(is_accumulator_order<Layout>(), "column_of_value() relies on this order");
    constexpr int kSubtileColumns = kTileN / decltype(size<4>(Layout{}))::value;
    auto [M, N, K, L] = args.problem_shape_mnkl;
    auto [m, n, k, l] = args.tile_coord_mnkl;
    int const first_column = int(n) * kTileN, rows = int(M) - int(m) * kTileM;
    int const tiles = ceil_div(int(M), kTileM) * ceil_div(int(N), kTileN);
    bool const whole = int(N) <= kHeld && tiles > 2 * int(gridDim.x * gridDim.y);
    // The order in which the warpgroups store keeps the second one's reads behind the fetch.
    bool const is_fetcher = !whole || (is_first_tile && cutlass::canonical_warp_group_idx() == 1);
    is_first_tile = false;
    return Callbacks<kSubtileColumns>(
        params.bias + (whole || params.bias == nullptr ? 0 : first_column), shared->bias,
        shared->bias + (whole ? first_column : 0),
        whole ? int(N) : min(int(N) - first_column, kTileN), params.bias != nullptr && is_fetcher,
        rows, args.thread_idx);
  }
};

}  // namespace cutlass_bn::gemm
