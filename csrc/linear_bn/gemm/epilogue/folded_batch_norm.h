// Epilogue visitor: eval-mode BatchNorm and activation on the accumulator, from the layer's own
// parameters.
//   y = act((scale * acc + (scale * bias - running_mean)) * (gamma / sqrt(running_var + eps)) +
//   beta)
// The mean is subtracted before the large factor is applied: folding further, to a * acc + c, would
// cancel at a large mean.
#pragma once

#include "cute/tensor.hpp"

#include "common/affine.cuh"
#include "linear_bn/gemm/epilogue/accumulator_order.h"
#include "linear_bn/gemm/epilogue/node.h"

namespace cutlass_bn::gemm {

template <class TileShape, int Warps>
struct FoldedBatchNorm : EpilogueNode {
  static constexpr int kTileM = cute::size<0>(TileShape{});
  static constexpr int kTileN = cute::size<1>(TileShape{});

  struct SharedStorage {
    alignas(16) FoldedAffine folded[kTileN];
  };

  struct Arguments {
    Layer layer;  // vectors of [N]
  };
  using Params = Arguments;

  CUTLASS_HOST_DEVICE FoldedBatchNorm() {}
  CUTLASS_HOST_DEVICE FoldedBatchNorm(Params const& params, SharedStorage const& shared)
      : params(&params), shared(const_cast<SharedStorage*>(&shared)) {}

  Params const* params = nullptr;
  SharedStorage* shared = nullptr;

  // SubtileColumns: width of an epilogue subtile.
  template <int SubtileColumns>
  struct Callbacks : cutlass::epilogue::fusion::EmptyConsumerStoreCallbacks {
    Params const& params;
    SharedStorage* shared;
    int first_column, n;
    int thread;
    FoldedAffine folded[SubtileColumns / 4];  // of this thread's columns of the subtile, two of
                                              // every eight

    CUTLASS_DEVICE Callbacks(Params const& params, SharedStorage* shared, int first_column, int n,
                             int thread)
        : params(params), shared(shared), first_column(first_column), n(n), thread(thread) {}

    // The last subtile's barriers keep these writes behind the previous tile's reads.
    CUTLASS_DEVICE void begin() {
      for (int column = thread; column < kTileN; column += Warps * 32) {
        int const i = first_column + column;
        if (i < n) shared->folded[column] = folded_affine(params.layer, i);
      }
    }
    CUTLASS_DEVICE bool begin_sync_needed() const { return true; }

    // Subtiles go down the rows first, so these serve all of them.
    CUTLASS_DEVICE void begin_loop(int epi_m, int epi_n) {
      if (epi_m != 0) return;
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < SubtileColumns / 4; ++c) {
        folded[c] = shared->folded[epi_n * SubtileColumns +
                                   column_of_value(c / 2 * 4 + c % 2, thread)];
      }
    }

    template <class Accumulator, class Input, int FragmentSize>
    CUTLASS_DEVICE auto visit(cutlass::Array<Accumulator, FragmentSize> const&, int epi_v, int, int,
                              cutlass::Array<Input, FragmentSize> const& input) {
      cutlass::Array<float, FragmentSize> y;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < FragmentSize; ++i) {
        int const value = epi_v * FragmentSize + i;
        y[i] = folded[value / 4 * 2 + value % 2](float(input[i]));
      }
      Activation const activation = params.layer.activation;
      if (activation != Activation::kNone) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < FragmentSize; ++i) y[i] = activate(y[i], activation);
      }
      return y;
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
    return Callbacks<kSubtileColumns>(*params, shared, int(n) * kTileN, int(N), args.thread_idx);
  }
};

}  // namespace cutlass_bn::gemm
