// Epilogue visitor: adds the Linear layer's bias to the accumulator before it is rounded to half precision. A bias that takes a large
// mean away has to do so first: the mean's rounding would stay. Rows past M get none, as a merge with no rows relies on zeros there.
#pragma once

#include "cute/tensor.hpp"

#include "common/channel_vector.h"
#include "linear_bn/gemm/accumulator_order.h"
#include "linear_bn/gemm/epilogue_node.h"

namespace cutlass_bn::gemm {

template <class TileShape, int Warps>
struct ColumnBias : EpilogueNode {
  static constexpr int kTileM = cute::size<0>(TileShape{});
  static constexpr int kTileN = cute::size<1>(TileShape{});

  struct SharedStorage {
    alignas(16) float bias[kTileN];
  };

  struct Arguments {
    ChannelVector bias;  // [N]; absent: 0
  };
  using Params = Arguments;

  CUTLASS_HOST_DEVICE ColumnBias() {}
  CUTLASS_HOST_DEVICE ColumnBias(Params const& params, SharedStorage const& shared)
      : params(params), shared(const_cast<SharedStorage*>(&shared)) {}

  Params params;
  SharedStorage* shared = nullptr;

  // SubtileColumns: width of an epilogue subtile.
  template <int SubtileColumns>
  struct Callbacks : cutlass::epilogue::fusion::EmptyConsumerStoreCallbacks {
    ChannelVector vector;
    SharedStorage* shared;
    int first_column, n;
    int rows;  // of the tile inside the matrix
    int thread;
    float bias[SubtileColumns / 4] = {};  // of this thread's columns of the subtile, two of every eight
    float inside[2] = {};                 // 1 for each of its two rows that is in the matrix, else 0

    CUTLASS_DEVICE Callbacks(ChannelVector const& vector, SharedStorage* shared, int first_column, int n, int rows, int thread)
        : vector(vector), shared(shared), first_column(first_column), n(n), rows(rows), thread(thread) {}

    // The last subtile's barriers keep these writes behind the previous tile's reads.
    CUTLASS_DEVICE void begin() {
      if (!vector) return;
      for (int column = thread; column < kTileN; column += Warps * 32) {
        int const i = first_column + column;
        shared->bias[column] = i < n ? vector.load(i) : 0.f;
      }
    }
    CUTLASS_DEVICE bool begin_sync_needed() const { return bool(vector); }

    // Subtiles go down the rows first, so a subtile's columns serve all of them.
    CUTLASS_DEVICE void begin_loop(int epi_m, int epi_n) {
      if (!vector) return;
      int const first_row = (epi_m * Warps + thread / 32) * 16 + thread % 32 / 4;
      inside[0] = first_row < rows ? 1.f : 0.f;
      inside[1] = first_row + 8 < rows ? 1.f : 0.f;
      if (epi_m != 0) return;
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < SubtileColumns / 4; ++c) {
        bias[c] = shared->bias[epi_n * SubtileColumns + column_of_value(c / 2 * 4 + c % 2, thread)];
      }
    }

    template <class Accumulator, int FragmentSize>
    CUTLASS_DEVICE auto visit(cutlass::Array<Accumulator, FragmentSize> const&, int epi_v, int, int,
                              cutlass::Array<float, FragmentSize> const& input) {
      if (!vector) return input;
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
  CUTLASS_DEVICE auto get_consumer_store_callbacks(cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    using namespace cute;
    using Layout = decltype(args.tCcD.layout());
    static_assert(is_accumulator_order<Layout>(), "column_of_value() relies on this order of a thread's values");
    constexpr int kSubtileColumns = kTileN / decltype(size<4>(Layout{}))::value;
    auto [M, N, K, L] = args.problem_shape_mnkl;
    auto [m, n, k, l] = args.tile_coord_mnkl;
    return Callbacks<kSubtileColumns>(params.bias, shared, int(n) * kTileN, int(N), int(M) - int(m) * kTileM, args.thread_idx);
  }
};

}  // namespace cutlass_bn::gemm
