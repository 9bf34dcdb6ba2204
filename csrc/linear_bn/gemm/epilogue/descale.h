// Epilogue visitor: takes the power of two of a split operand's row and column out of the
// accumulator,
//   u[m, n] = acc[m, n] * 2^-(x_exponents[m] + w_exponents[n]).
// A float holds no power beyond 2^+-127, and the two together may be far beyond; halves of each are
// multiplied first. Then the first of the two factors can only under- or overflow where the result
// does, so that it is rounded once at most.
#pragma once

#include "cute/tensor.hpp"

#include "linear_bn/gemm/epilogue/accumulator_order.h"
#include "linear_bn/gemm/epilogue/node.h"

namespace cutlass_bn::gemm {

template <class TileShape, int Warps>
struct Descale : EpilogueNode {
  static constexpr int kTileM = cute::size<0>(TileShape{});
  static constexpr int kTileN = cute::size<1>(TileShape{});
  static_assert(kTileM == 16 * Warps, "a thread has two rows");

  struct SharedStorage {};

  struct Arguments {
    int32_t const* x_exponents = nullptr;  // [M]
    int32_t const* w_exponents = nullptr;  // [N]
  };
  using Params = Arguments;

  CUTLASS_HOST_DEVICE Descale() {}
  CUTLASS_HOST_DEVICE Descale(Params const& params, SharedStorage const&) : params(params) {}

  Params params;

  // 2^-exponent as the product of two floats.
  struct Factor {
    float first, second;
    CUTLASS_DEVICE explicit Factor(int exponent) {
      int const half = -exponent >> 1;
      first = __int_as_float((127 + half) << 23);
      second = __int_as_float((127 - exponent - half) << 23);
    }
  };

  // SubtileColumns: width of an epilogue subtile.
  template <int SubtileColumns>
  struct Callbacks : cutlass::epilogue::fusion::EmptyConsumerStoreCallbacks {
    int columns[kTileN / 4];  // exponents of this thread's columns, two of every eight
    Factor rows[2];

    CUTLASS_DEVICE Callbacks(Params const& params, int first_row, int first_column, int m, int n,
                             int thread)
        : rows{Factor(load(params.x_exponents, first_row + thread / 32 * 16 + thread % 32 / 4, m)),
               Factor(load(params.x_exponents, first_row + thread / 32 * 16 + thread % 32 / 4 + 8,
                           m))} {
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kTileN / 4; ++c) {
        columns[c] = load(params.w_exponents,
                          first_column + column_of_value(c / 2 * 4 + c % 2, thread), n);
      }
    }

    CUTLASS_DEVICE static int load(int32_t const* exponents, int i, int size) {
      return i < size ? exponents[i] : 0;
    }

    template <class Accumulator, int FragmentSize>
    CUTLASS_DEVICE auto visit(cutlass::Array<Accumulator, FragmentSize> const&, int epi_v, int,
                              int epi_n, cutlass::Array<float, FragmentSize> const& input) {
      cutlass::Array<float, FragmentSize> u;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < FragmentSize; ++i) {
        int const value = epi_v * FragmentSize + i;
        Factor const& row = rows[value / 2 % 2];
        Factor const column(columns[epi_n * (SubtileColumns / 4) + value / 4 * 2 + value % 2]);
        u[i] = input[i] * (row.first * column.first) * (row.second * column.second);
      }
      return u;
    }
  };

  template <bool ReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    using namespace cute;
    using Layout = decltype(args.tCcD.layout());
    static_assert(is_accumulator_order<Layout>(),
                  "column_of_value() relies on this order of a thread's values");
    constexpr int kSubtileColumns = kTileN / decltype(size<4>(Layout{}))::value;
    auto [M, N, K, L] = args.problem_shape_mnkl;
    auto [m, n, k, l] = args.tile_coord_mnkl;
    return Callbacks<kSubtileColumns>(params, int(m) * kTileM, int(n) * kTileN, int(M), int(N),
                                      args.thread_idx);
  }
};

}  // namespace cutlass_bn::gemm
