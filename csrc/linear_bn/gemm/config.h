// The compiled tile shapes. Measurements behind them: docs/performance.md.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass/epilogue/dispatch_policy.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"

#include "linear_bn/gemm/instances.h"

namespace cutlass_bn::gemm {

// One k-block is 128 bytes a row, the widest shared-memory swizzle.
template <class Element>
using BlockK = cute::Int<128 / sizeof(Element)>;

// Ping-pong: two warpgroups take tiles in turn, one computes while the other stores, so the epilogue's moments cost no time of the
// tensor cores. A cooperative 128x256 or 256x128 tile exposes them.
template <int TileM, int TileN>
struct PingpongConfig {
  template <class Element>
  using TileShape = cute::Shape<cute::Int<TileM>, cute::Int<TileN>, BlockK<Element>>;
  using ClusterShape = cute::Shape<cute::_1, cute::_1, cute::_1>;  // sharing loads gained nothing and costs idle pairs on few tiles
  using MainloopSchedule = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
  using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized;
  static constexpr int kEpilogueWarps = 4;
};

struct LargeConfig : PingpongConfig<128, 128> {};
struct MediumConfig : PingpongConfig<64, 128> {};
struct SmallConfig : PingpongConfig<64, 64> {};

}  // namespace cutlass_bn::gemm
