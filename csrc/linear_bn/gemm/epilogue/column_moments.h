// Epilogue visitor: the mean and M2 of every column of an output tile, gathered while the tile is
// stored.
//
// Sits on top of the accumulator in a CUTLASS sm90 TMA warp-specialised epilogue. What it costs is
// exposed in a cooperative kernel (the tensor cores wait for the epilogue), so it is arranged
// around instruction count and latency:
//
//  1. As each subtile is visited, a thread reduces its own rows of each of its columns; the result
//     takes the place of the accumulators just stored, so this needs no registers of its own.
//  2. After the last subtile's store has been issued, the eight row lanes of each warp merge all
//     columns at once by swap-shuffles: three levels, each halving the columns that a lane still
//     owns. One batch, so the shuffles' latency is hidden.
//  3. The warps' results meet in shared memory, and one thread a column writes (mean, M2) of the
//     tile to global memory.
//
// Every merge is Chan's formula. Its weights are per-thread registers set once per tile, so tiles
// with rows past M take the same path: such rows have weight 0. No atomics: one writer for each
// value.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/numeric_conversion.h"

#include "linear_bn/gemm/epilogue/accumulator_order.h"
#include "linear_bn/gemm/epilogue/node.h"

namespace cutlass_bn::gemm {

// TileShape: the CTA's (M, N, K). Element: the stored type; moments are taken of the rounded
// values, so that a constant column has M2 = 0 and a mean equal to what was stored. Warps: those
// that run the epilogue together, each on 16 rows of a 64-row atom.
template <class TileShape, class Element, int Warps>
struct ColumnMoments : EpilogueNode {
  static constexpr int kTileM = cute::size<0>(TileShape{});
  static constexpr int kTileN = cute::size<1>(TileShape{});
  static constexpr int kAtomRows = 16;  // rows of a warp in one wgmma accumulator
  static constexpr int kAtoms = kTileM / (kAtomRows * Warps);  // accumulators a warp holds along M
  static constexpr int kRowLanes = 8;          // lanes that hold the same columns, rows apart
  static constexpr int kColumns = kTileN / 4;  // columns a thread holds: 2 of every 8
  static_assert(kAtoms * kAtomRows * Warps == kTileM && kColumns % kRowLanes == 0);

  struct SharedStorage {
    alignas(16) float2 warp_moments[Warps][kTileN];
  };

  struct Arguments {
    float2* partials = nullptr;  // [ceil(M / kTileM), N]
  };
  using Params = Arguments;

  CUTLASS_HOST_DEVICE ColumnMoments() {}
  CUTLASS_HOST_DEVICE ColumnMoments(Params const& params, SharedStorage const& shared)
      : params(params), shared(const_cast<SharedStorage*>(&shared)) {}

  Params params;
  SharedStorage* shared = nullptr;

  struct Callbacks : cutlass::epilogue::fusion::EmptyConsumerStoreCallbacks {
    float mean[kColumns], m2[kColumns];  // of this thread's rows, then of ever more of the warp's
    float2* partials;                    // this tile's row of the output, at its first column
    SharedStorage* shared;
    int rows, columns;  // of the tile inside the matrix
    int thread;
    // Weights of the merges of this thread's own rows: the second of a pair, the second pair.
    float pair_weight[kAtoms], atom_weight[kAtoms], atom_m2_weight[kAtoms];
    float count;  // of this thread's valid rows

    CUTLASS_DEVICE Callbacks(float2* partials, SharedStorage* shared, int rows, int columns,
                             int thread)
        : partials(partials), shared(shared), rows(rows), columns(columns), thread(thread) {
      int const lane_row = (thread % 32) / 4;
      count = 0.f;
      CUTLASS_PRAGMA_UNROLL
      for (int atom = 0; atom < kAtoms; ++atom) {
        int const left = rows - first_row(thread / 32, atom) - lane_row;
        float const atom_count = (left > 0 ? 1.f : 0.f) + (left > 8 ? 1.f : 0.f);
        float const total = count + atom_count;
        pair_weight[atom] = left > 8 ? 0.5f : 0.f;
        atom_weight[atom] = total > 0.f ? atom_count / total : 0.f;
        atom_m2_weight[atom] = count * atom_weight[atom];
        count = total;
      }
    }

    CUTLASS_DEVICE static int first_row(int warp, int atom) {
      return (atom * Warps + warp) * kAtomRows;
    }

    template <class Accumulator, class Input, int FragmentSize>
    CUTLASS_DEVICE auto visit(cutlass::Array<Accumulator, FragmentSize> const&, int, int, int,
                              cutlass::Array<Input, FragmentSize> const& input) {
      return cutlass::NumericArrayConverter<Element, Input, FragmentSize>{}(input);
    }

    // Step 1. Values i and i + 2 of each four are the same column, 8 rows apart
    // (accumulator_order.h).
    template <class Buffer, class Sync, class VisitResults>
    CUTLASS_DEVICE void reduce(Buffer&&, Sync const&, int epi_m, int epi_n, bool,
                               VisitResults results) {
      constexpr int kFragment = cute::remove_cvref_t<decltype(results(0))>::kElements;
      constexpr int kSubtileColumns = decltype(cute::size(results))::value * kFragment / 2;
      auto value = [&](int i) { return float(results(i / kFragment)[i % kFragment]); };
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kSubtileColumns; ++c) {
        int const slot = epi_n * kSubtileColumns + c;
        float const first = value(c / 2 * 4 + c % 2), second = value(c / 2 * 4 + 2 + c % 2);
        float const d = second - first;
        float const pair_mean = fmaf(d, pair_weight[epi_m], first);
        float const pair_m2 = d * pair_weight[epi_m] * d;  // in this order: d * d may overflow, and
                                                           // a row past M weighs 0
        if (epi_m == 0) {
          mean[slot] = pair_mean;
          m2[slot] = pair_m2;
        } else {
          float const delta = pair_mean - mean[slot];
          mean[slot] = fmaf(delta, atom_weight[epi_m], mean[slot]);
          m2[slot] = fmaf(delta * atom_m2_weight[epi_m], delta, m2[slot] + pair_m2);
        }
      }
    }

    CUTLASS_DEVICE void end() {
      merge_lanes<16, kColumns / 2>();
      merge_lanes<8, kColumns / 4>();
      merge_lanes<4, kColumns / 8>();
      store_warp_moments();
      cutlass::arch::NamedBarrier::sync(Warps * 32,
                                        cutlass::arch::ReservedNamedBarriers::EpilogueBarrier);
      // The next tile's barriers keep the next store_warp_moments() behind these reads.
      for (int column = thread; column < kTileN; column += Warps * 32) merge_warps(column);
    }

    // Step 2. A lane hands one half of its columns to its partner and takes the partner's share of
    // the other half.
    template <int LaneDistance, int Keep>
    CUTLASS_DEVICE void merge_lanes() {
      constexpr unsigned kAllLanes = 0xffffffffu;
      float const other_count = __shfl_xor_sync(kAllLanes, count, LaneDistance);
      float const total = count + other_count;
      float const weight = total > 0.f ? other_count / total : 0.f;  // rounded: exactly 1 where
                                                                     // this lane has no rows
      float const m2_weight = count * weight;
      count = total;
      bool const upper = thread & LaneDistance;
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < Keep; ++c) {
        float const sent_mean = upper ? mean[c] : mean[c + Keep],
                    sent_m2 = upper ? m2[c] : m2[c + Keep];
        float const kept_mean = upper ? mean[c + Keep] : mean[c],
                    kept_m2 = upper ? m2[c + Keep] : m2[c];
        float const delta = __shfl_xor_sync(kAllLanes, sent_mean, LaneDistance) - kept_mean;
        float const other_m2 = __shfl_xor_sync(kAllLanes, sent_m2, LaneDistance);
        mean[c] = fmaf(delta, weight, kept_mean);
        m2[c] = fmaf(delta * m2_weight, delta, kept_m2 + other_m2);
      }
    }

    // A lane is left with kColumns / 8 of the warp's columns, in runs of two.
    CUTLASS_DEVICE void store_warp_moments() {
      constexpr int kLeft = kColumns / kRowLanes;
      static_assert(kLeft % 2 == 0);
      int const lane = thread % 32;
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kLeft; c += 2) {
        int const slot = lane / 4 * kLeft + c;
        int const column = slot / 2 * 8 + lane % 4 * 2;
        *reinterpret_cast<float4*>(&shared->warp_moments[thread / 32][column]) = make_float4(
            mean[c], m2[c], mean[c + 1], m2[c + 1]);
      }
    }

    // Step 3. Sums around the first warp's mean, which is one of the means: M2 exceeds what cancels
    // by the number of warps at most.
    CUTLASS_DEVICE void merge_warps(int column) {
      if (column >= columns || rows <= 0) return;
      float const shift = shared->warp_moments[0][column].x;
      float sum = 0.f, square = 0.f, inner = 0.f;
      CUTLASS_PRAGMA_UNROLL
      for (int warp = 0; warp < Warps; ++warp) {
        float2 const moments = shared->warp_moments[warp][column];
        int warp_rows = 0;
        CUTLASS_PRAGMA_UNROLL
        for (int atom = 0; atom < kAtoms; ++atom)
          warp_rows += min(max(rows - first_row(warp, atom), 0), kAtomRows);
        float const delta = moments.x - shift;
        sum = fmaf(float(warp_rows), delta, sum);
        square = fmaf(float(warp_rows) * delta, delta, square);
        inner += moments.y;
      }
      float const offset = sum / float(min(rows, kTileM));
      float const between = fmaf(-sum, offset, square);
      partials[column] = make_float2(shift + offset, inner + (between < 0.f ? 0.f : between));
    }
  };

  template <bool ReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    using namespace cute;
    using Layout = remove_cvref_t<decltype(args.tCcD.layout())>;
    static_assert(is_accumulator_order<Layout>(),
                  "reduce() relies on this order of a thread's values");
    static_assert(decltype(size<3>(Layout{}))::value == kAtoms,
                  "a subtile must be one accumulator high");
    auto [M, N, K, L] = args.problem_shape_mnkl;
    auto [m, n, k, l] = args.tile_coord_mnkl;
    int const first_column = int(n) * kTileN;
    return Callbacks(params.partials + int64_t(m) * int64_t(N) + first_column, shared,
                     int(M) - int(m) * kTileM, int(N) - first_column, args.thread_idx);
  }
};

}  // namespace cutlass_bn::gemm
