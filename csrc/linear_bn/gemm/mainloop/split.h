// Mainloop of the split fp32 GEMM: three fp16 products from four tiles, loaded once per k-block.
//
// Each operand is two fp16 planes, x * 2^e = hi + lo * 2^-kSplitShift (linear_bn/split/split.h). A
// k-block's tiles of x_hi, x_lo, w_hi and w_lo come in as one pipeline stage, and make
//
//   block = hi * hi            which the fp32 units add to the result after every k-block
//   low  += lo * hi + hi * lo  for the whole of K
//
// Tensor cores add with truncation, a bias that grows with the number of additions; `block` sees
// kBlockK / 16 of them, and the fp32 units round. `low` is at most 2^-10 of sum |x w|, so that its
// bias is out of sight. The fp32 additions wait for `block` alone and run while the tensor cores
// work on `low`.
//
// Compensated: Kahan's summation. What an addition to the result loses stays in
// `block`, and the next k-block's products are added to it: the error doesn't grow with K. The fp32
// units are then the limit (docs/notes/2026-11-29-split-fp32.md). Three accumulators fix the tile:
// 64 x 128 a warpgroup fill the registers.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/numeric_types.h"
#include "cutlass/pipeline/pipeline.hpp"

#include "linear_bn/split/split.h"

namespace cutlass_bn::gemm {

// A collective mainloop as cutlass::gemm::kernel::GemmUniversal takes it. Stages: of four tiles
// each.
template <class TileShape_, class ClusterShape, class Schedule, int Stages, bool Compensated>
struct SplitMainloop {
  using DispatchPolicy = cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<Stages, ClusterShape,
                                                                           Schedule>;
  using ArchTag = typename DispatchPolicy::ArchTag;
  using TileShape = TileShape_;
  using ElementA = cutlass::half_t;
  using ElementB = cutlass::half_t;
  using ElementAccumulator = float;
  using StrideA = cute::Stride<int64_t, cute::_1, int64_t>;  // row, column, plane
  using StrideB = StrideA;

  static constexpr int kTileM = cute::size<0>(TileShape{});
  static constexpr int kTileN = cute::size<1>(TileShape{});
  static constexpr int kBlockK = cute::size<2>(TileShape{});
  static constexpr int
      kWarpgroups = cute::is_base_of_v<cutlass::gemm::KernelTmaWarpSpecializedCooperative, Schedule>
                        ? kTileM / 64
                        : 1;
  static_assert(kTileM / kWarpgroups * kTileN <= 64 * 128,
                "three accumulators must fit in the registers");

  using TiledMma = decltype(cute::make_tiled_mma(
      cute::SM90::GMMA::ss_op_selector<
          ElementA, ElementB, float, cute::Shape<cute::_64, cute::Int<kTileN>, cute::Int<kBlockK>>,
          cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K>(),
      cute::Layout<cute::Shape<cute::Int<kWarpgroups>, cute::_1, cute::_1>>{}));

  template <int Multicast>
  using TmaLoad = cute::conditional_t<Multicast == 1, cute::SM90_TMA_LOAD,
                                      cute::SM90_TMA_LOAD_MULTICAST>;
  using GmemTiledCopyA = TmaLoad<cute::size<1>(ClusterShape{})>;
  using GmemTiledCopyB = TmaLoad<cute::size<0>(ClusterShape{})>;
  using SmemLayoutAtomA = cute::conditional_t<kBlockK % 64 == 0,
                                              cute::SM90::GMMA::Layout_K_SW128_Atom<ElementA>,
                                              cute::SM90::GMMA::Layout_K_SW64_Atom<ElementA>>;
  using SmemLayoutAtomB = SmemLayoutAtomA;
  using SmemCopyAtomA = void;
  using SmemCopyAtomB = void;
  using TransformA = cute::identity;
  using TransformB = cute::identity;

  // (rows, k, tiles): the hi and lo tile of a stage follow each other.
  template <int Rows>
  using SmemLayout = decltype(cute::tile_to_shape(
      SmemLayoutAtomA{},
      cute::Shape<cute::Int<Rows>, cute::Int<kBlockK>, cute::Int<2 * Stages>>{}));
  using SmemLayoutA = SmemLayout<kTileM>;
  using SmemLayoutB = SmemLayout<kTileN>;

  using MainloopPipeline = cutlass::PipelineTmaAsync<Stages>;
  using PipelineState = cutlass::PipelineState<Stages>;
  using PipelineParams = typename MainloopPipeline::Params;
  static constexpr int NumProducerThreadEvents = 1;
  static constexpr int K_PIPE_MAX = Stages;

  struct SharedStorage {
    struct TensorStorage : cute::aligned_struct<128, cute::_0> {
      cute::array_aligned<ElementA, cute::cosize_v<SmemLayoutA>> a;
      cute::array_aligned<ElementB, cute::cosize_v<SmemLayoutB>> b;
    } tensors;
    using PipelineStorage = typename MainloopPipeline::SharedStorage;
    PipelineStorage pipeline;
  };
  using TensorStorage = typename SharedStorage::TensorStorage;
  using PipelineStorage = typename SharedStorage::PipelineStorage;

  static constexpr uint32_t TmaTransactionBytes = 2 * (kTileM + kTileN) * kBlockK *
                                                  sizeof(ElementA);

  struct Arguments {
    ElementA const* a;  // [2, M, K]
    StrideA stride_a;
    ElementB const* b;  // [2, N, K]
    StrideB stride_b;
  };

  struct Params {
    using Bits = uint16_t;  // no conversion by TMA
    using TmaA = decltype(cute::make_tma_copy_A_sm90(
        GmemTiledCopyA{},
        cute::make_tensor(static_cast<Bits const*>(nullptr),
                          cute::repeat_like(StrideA{}, int32_t(0)), StrideA{}),
        SmemLayoutA{}(cute::_, cute::_, cute::_0{}), TileShape{}, ClusterShape{}));
    using TmaB = decltype(cute::make_tma_copy_B_sm90(
        GmemTiledCopyB{},
        cute::make_tensor(static_cast<Bits const*>(nullptr),
                          cute::repeat_like(StrideB{}, int32_t(0)), StrideB{}),
        SmemLayoutB{}(cute::_, cute::_, cute::_0{}), TileShape{}, ClusterShape{}));
    TmaA tma_a;
    TmaB tma_b;
    uint32_t tma_transaction_bytes = TmaTransactionBytes;
  };

  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(ProblemShape const& problem,
                                                  Arguments const& args, void*) {
    using namespace cute;
    using Bits = typename Params::Bits;
    auto const [M, N, K, L] = problem;
    auto const a = make_tensor(reinterpret_cast<Bits const*>(args.a),
                               make_layout(make_shape(M, K, 2), args.stride_a));
    auto const b = make_tensor(reinterpret_cast<Bits const*>(args.b),
                               make_layout(make_shape(N, K, 2), args.stride_b));
    return {make_tma_copy_A_sm90(GmemTiledCopyA{}, a, SmemLayoutA{}(_, _, _0{}), TileShape{},
                                 ClusterShape{}),
            make_tma_copy_B_sm90(GmemTiledCopyB{}, b, SmemLayoutB{}(_, _, _0{}), TileShape{},
                                 ClusterShape{})};
  }

  template <class ProblemShape>
  static bool can_implement(ProblemShape const&, Arguments const&) {
    return true;
  }

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    cute::prefetch_tma_descriptor(params.tma_a.get_tma_descriptor());
    cute::prefetch_tma_descriptor(params.tma_b.get_tma_descriptor());
  }

  // The operands' tiles: (rows, k of a block, tile, k-block, plane).
  template <class ProblemShape>
  CUTLASS_DEVICE auto load_init(ProblemShape const& problem, Params const& params) const {
    using namespace cute;
    auto const [M, N, K, L] = problem;
    Tensor a = params.tma_a.get_tma_tensor(make_shape(M, K, 2));
    Tensor b = params.tma_b.get_tma_tensor(make_shape(N, K, 2));
    return make_tuple(local_tile(a, TileShape{}, make_coord(_, _, _), Step<_1, X, _1>{}),
                      local_tile(b, TileShape{}, make_coord(_, _, _), Step<X, _1, _1>{}));
  }

  // By one warp: fills a stage for every k-block of an output tile.
  template <class TilesA, class TilesB, class KBlocks, class BlockCoord>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline, PipelineState write,
                           cute::tuple<TilesA, TilesB> const& tiles, BlockCoord const& coord,
                           KBlocks k_block, int k_blocks, int, uint32_t rank_in_cluster,
                           TensorStorage& shared) {
    using namespace cute;
    if (!elect_one_sync()) return;
    Tensor sa = make_tensor(make_smem_ptr(shared.a.data()), SmemLayoutA{});
    Tensor sb = make_tensor(make_smem_ptr(shared.b.data()), SmemLayoutB{});
    constexpr uint32_t kClusterM = size<0>(ClusterShape{}), kClusterN = size<1>(ClusterShape{});
    uint32_t const cluster_m = rank_in_cluster % kClusterM, cluster_n = rank_in_cluster / kClusterM;
    auto tma_a = params.tma_a.get_slice(cluster_n);
    auto tma_b = params.tma_b.get_slice(cluster_m);
    auto [m, n, k, l] = coord;
    Tensor from_a = tma_a.partition_S(get<0>(tiles)(_, _, m, _, _));  // (TMA, TMA_M, TMA_K,
                                                                      // k-blocks, planes)
    Tensor from_b = tma_b.partition_S(get<1>(tiles)(_, _, n, _, _));
    Tensor to_a = tma_a.partition_D(sa);  // (TMA, TMA_M, TMA_K, tiles)
    Tensor to_b = tma_b.partition_D(sb);
    uint16_t mask_a = 0, mask_b = 0;
    auto const ranks = Layout<ClusterShape>{};
    for (uint32_t i = 0; i < kClusterN; ++i) mask_a |= uint16_t(1) << ranks(cluster_m, i, _0{});
    for (uint32_t i = 0; i < kClusterM; ++i) mask_b |= uint16_t(1) << ranks(i, cluster_n, _0{});

    CUTLASS_PRAGMA_NO_UNROLL
    for (; k_blocks > 0; --k_blocks, ++k_block, ++write) {
      pipeline.producer_acquire(write);
      auto* const barrier = pipeline.producer_get_barrier(write);
      CUTLASS_PRAGMA_UNROLL
      for (int plane = 0; plane < 2; ++plane) {
        int const tile = 2 * write.index() + plane;
        copy(params.tma_a.with(*barrier, mask_a), from_a(_, _, _, *k_block, plane),
             to_a(_, _, _, tile));
        copy(params.tma_b.with(*barrier, mask_b), from_b(_, _, _, *k_block, plane),
             to_b(_, _, _, tile));
      }
    }
  }

  // Keeps a block of a cluster alive until its peers have read what it sent them.
  CUTLASS_DEVICE void load_tail(MainloopPipeline pipeline, PipelineState write) {
    if (cute::elect_one_sync()) pipeline.producer_tail(write);
  }

  template <class Accumulator>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState read, Accumulator& result,
                          int k_blocks, int thread, TensorStorage& shared, Params const&) {
    using namespace cute;
    Tensor sa = make_tensor(make_smem_ptr(shared.a.data()), SmemLayoutA{});
    Tensor sb = make_tensor(make_smem_ptr(shared.b.data()), SmemLayoutB{});
    int const warpgroup = __shfl_sync(0xffffffffu, thread / cutlass::NumThreadsPerWarpGroup, 0);
    TiledMma block_mma, low_mma;
    auto const slice = block_mma.get_slice(warpgroup * cutlass::NumThreadsPerWarpGroup);
    Tensor a = slice.make_fragment_A(slice.partition_A(sa));  // descriptors: (MMA, MMA_M, MMA_K,
                                                              // tiles)
    Tensor b = slice.make_fragment_B(slice.partition_B(sb));
    auto block = make_fragment_like(result), low = make_fragment_like(result);

    clear(result);
    low_mma.accumulate_ = GMMA::ScaleOut::Zero;
    block_mma.accumulate_ = GMMA::ScaleOut::Zero;
    PipelineState release = read;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < k_blocks; ++i, ++read) {
      pipeline.consumer_wait(read, pipeline.consumer_try_wait(read));
      int const hi = 2 * read.index(), lo = hi + 1;
      warpgroup_fence_operand(block);
      warpgroup_fence_operand(low);
      warpgroup_arrive();
      if constexpr (!Compensated) block_mma.accumulate_ = GMMA::ScaleOut::Zero;
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < size<2>(a); ++k) {
        cute::gemm(block_mma, a(_, _, k, hi), b(_, _, k, hi), block);
        block_mma.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < size<2>(a); ++k) {
        cute::gemm(low_mma, a(_, _, k, lo), b(_, _, k, hi), low);
        low_mma.accumulate_ = GMMA::ScaleOut::One;
        cute::gemm(low_mma, a(_, _, k, hi), b(_, _, k, lo), low);
      }
      warpgroup_commit_batch();
      warpgroup_wait<1>();  // for `block`, and for the previous k-block's `low`
      warpgroup_fence_operand(block);
      if (i > 0) {
        pipeline.consumer_release(release);
        ++release;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < size(result); ++v) {
        if constexpr (Compensated) {
          float const sum = __fadd_rn(result(v), block(v));
          block(v) = __fsub_rn(block(v), __fsub_rn(sum, result(v)));
          result(v) = sum;
        } else {
          result(v) += block(v);
        }
      }
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(low);
    if (k_blocks > 0) pipeline.consumer_release(release);
    constexpr float kLowUnit = 1.f / (1 << linear_bn::kSplitShift);
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < size(result); ++v) result(v) = fmaf(low(v), kLowUnit, result(v));
  }

  // mma() leaves nothing in flight.
  CUTLASS_DEVICE void mma_tail(MainloopPipeline, PipelineState, int) {}
};

}  // namespace cutlass_bn::gemm
