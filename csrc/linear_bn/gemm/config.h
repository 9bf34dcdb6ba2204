// The compiled tile shapes. Measurements behind them: docs/notes/2026-11-29-fused-gemm.md.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass/epilogue/dispatch_policy.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"

#include "linear_bn/gemm/instances.h"
#include "linear_bn/gemm/mainloop/split.h"

namespace cutlass_bn::gemm {

// One k-block is 128 bytes a row, the widest shared-memory swizzle.
template <class Element>
using BlockK = cute::Int<128 / sizeof(Element)>;

// Ping-pong: two warpgroups take tiles in turn, one computes while the other stores, so the
// epilogue's moments cost no time of the tensor cores. A cooperative 128x256 or 256x128 tile
// exposes them.
template <int TileM, int TileN>
struct PingpongConfig {
  template <class Element>
  using TileShape = cute::Shape<cute::Int<TileM>, cute::Int<TileN>, BlockK<Element>>;
  using ClusterShape = cute::Shape<cute::_1, cute::_1,
                                   cute::_1>;  // sharing loads gained nothing and costs idle pairs
                                               // on few tiles
  using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized;
  static constexpr int kEpilogueWarps = 4;

  template <class Element, class Epilogue>
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cutlass::layout::RowMajor,
      16 / sizeof(Element), Element, cutlass::layout::ColumnMajor, 16 / sizeof(Element), float,
      TileShape<Element>, ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      cutlass::gemm::KernelTmaWarpSpecializedPingpong>::CollectiveOp;
};

struct LargeConfig : PingpongConfig<128, 128> {};
struct MediumConfig : PingpongConfig<64, 128> {};
struct SmallConfig : PingpongConfig<64, 64> {};

// Cooperative: the split mainloop's accumulators leave no registers for a second tile in flight.
// k-blocks of 32 for exactness: each addition inside the tensor cores truncates.
template <int TileN, int Stages, bool Compensated>
struct SplitConfig {
  template <class Element>
  using TileShape = cute::Shape<cute::_128, cute::Int<TileN>, cute::_32>;
  using ClusterShape = cute::Shape<cute::_1, cute::_1, cute::_1>;
  using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecializedCooperative;
  static constexpr int kEpilogueWarps = 8;

  template <class Element, class Epilogue>
  using Mainloop = SplitMainloop<TileShape<Element>, ClusterShape,
                                 cutlass::gemm::KernelTmaWarpSpecializedCooperative, Stages,
                                 Compensated>;
};

struct SplitLargeConfig : SplitConfig<128, 5, false> {};
struct SplitSmallConfig : SplitConfig<64, 7, true> {};

}  // namespace cutlass_bn::gemm
