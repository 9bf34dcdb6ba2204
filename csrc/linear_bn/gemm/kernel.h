// Assembly of the Hopper GEMM kernels from CUTLASS collectives, and their launch. Each file of
// instantiations/ makes one kernel.
#pragma once

#include <type_traits>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

#include "common/check.h"
#include "common/device_info.h"
#include "common/math.h"
#include "linear_bn/gemm/config.h"
#include "linear_bn/gemm/epilogue/column_bias.h"
#include "linear_bn/gemm/epilogue/column_moments.h"
#include "linear_bn/gemm/epilogue/descale.h"
#include "linear_bn/gemm/epilogue/folded_batch_norm.h"
#include "linear_bn/gemm/instances.h"

namespace cutlass_bn::gemm {

// Element: operand type (float runs as TF32; half_t where Config is a split one). Output: stored
// type. Fusion: epilogue visitor tree.
template <class Config, class Element, class Output, class Fusion>
struct Kernel {
  using TileShape = typename Config::template TileShape<Element>;
  static constexpr int kOutputAlignment = 16 / sizeof(Output);

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, typename Config::ClusterShape,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void,
      cutlass::layout::RowMajor, kOutputAlignment, Output, cutlass::layout::RowMajor,
      kOutputAlignment, typename Config::EpilogueSchedule, Fusion>::CollectiveOp;

  using Mainloop = typename Config::template Mainloop<Element, Epilogue>;
  using GemmKernel = cutlass::gemm::kernel::GemmUniversal<
      cute::Shape<int, int, int, int>, Mainloop, Epilogue, cutlass::gemm::PersistentScheduler>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<GemmKernel>;

  using RasterOrder = cutlass::gemm::kernel::detail::RasterOrderOptions;

  static void launch(Operands const& operands, void* output, int64_t ld_output,
                     typename Fusion::Arguments const& fusion, cudaStream_t stream) {
    int const m = int(operands.m), n = int(operands.n), k = int(operands.k);
    cutlass::KernelHardwareInfo hardware;
    CUTLASS_BN_CUDA(cudaGetDevice(&hardware.device_id));
    hardware.sm_count = balanced(m, n, device_info().sm_count);
    typename Gemm::Arguments args{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {m, n, k, 1},
        {static_cast<Element const*>(operands.x),
         {operands.ldx, cute::_1{}, operands.x_plane},
         static_cast<Element const*>(operands.w),
         {operands.ldw, cute::_1{}, operands.w_plane}},
        {fusion, nullptr, {}, static_cast<Output*>(output), {ld_output, cute::_1{}, int64_t(0)}},
        hardware};
    args.scheduler.raster_order = RasterOrder::AlongN;
    args.scheduler.max_swizzle_size = 8;  // tiles down the rows that are kept together for L2; both
                                          // are the fastest measured
    Gemm gemm;
    // Not can_implement(): it wants N and K themselves to be multiples of 16 bytes, where TMA needs
    // only the row strides to be (unsupported_reason) and clips the rest.
    CUTLASS_BN_CHECK(Gemm::get_workspace_size(args) == 0, "GEMM: expected no workspace, got ",
                     Gemm::get_workspace_size(args), " bytes");
    check(gemm.initialize(args, nullptr, stream), "initialize");
    check(gemm.run(stream), "run");
  }

 private:
  // The fewest multiprocessors that finish in as many rounds of tiles.
  static int balanced(int64_t m, int64_t n, int sm_count) {
    int64_t const tiles = ceil_div(m, cute::size<0>(TileShape{})) *
                          ceil_div(n, cute::size<1>(TileShape{}));
    return static_cast<int>(ceil_div(tiles, ceil_div(tiles, sm_count)));
  }

  static void check(cutlass::Status status, char const* step) {
    CUTLASS_BN_CHECK(status == cutlass::Status::kSuccess, "GEMM ", step, ": ",
                     cutlassGetStatusString(status));
  }
};

template <DType dtype>
using ElementOf = std::conditional_t<
    dtype == DType::kFloat32, float,
    std::conditional_t<dtype == DType::kFloat16, cutlass::half_t, cutlass::bfloat16_t>>;

template <class Config, DType dtype>
void run_moments(MomentsParams const& p, cudaStream_t stream) {
  namespace fusion = cutlass::epilogue::fusion;
  using Element = ElementOf<dtype>;
  using Tile = typename Config::template TileShape<Element>;
  using Moments = ColumnMoments<Tile, Element, Config::kEpilogueWarps>;
  if constexpr (dtype == DType::kFloat32) {
    using Fusion = fusion::Sm90EVT<Moments, fusion::Sm90AccFetch>;
    Kernel<Config, Element, Element, Fusion>::launch(p.operands, p.u, p.ldu, {{}, {p.partials}},
                                                     stream);
  } else {
    using Biased = fusion::Sm90EVT<ColumnBias<Tile, Element, Config::kEpilogueWarps>,
                                   fusion::Sm90AccFetch>;
    using Fusion = fusion::Sm90EVT<Moments, Biased>;
    Kernel<Config, Element, Element, Fusion>::launch(
        p.operands, p.u, p.ldu, {{{}, {static_cast<Element const*>(p.bias.data)}}, {p.partials}},
        stream);
  }
}

template <class Config, DType dtype, DType y_dtype>
void run_inference(InferenceParams const& p, cudaStream_t stream) {
  namespace fusion = cutlass::epilogue::fusion;
  using Element = ElementOf<dtype>;
  using Affine = FoldedBatchNorm<typename Config::template TileShape<Element>,
                                 Config::kEpilogueWarps>;
  using Fusion = fusion::Sm90EVT<Affine, fusion::Sm90AccFetch>;
  Kernel<Config, Element, ElementOf<y_dtype>, Fusion>::launch(p.operands, p.y, p.ldy,
                                                              {{}, {p.layer}}, stream);
}

template <class Config>
using SplitDescale = cutlass::epilogue::fusion::Sm90EVT<
    Descale<typename Config::template TileShape<cutlass::half_t>, Config::kEpilogueWarps>,
    cutlass::epilogue::fusion::Sm90AccFetch>;

template <class Config>
typename SplitDescale<Config>::Arguments descale_arguments(Operands const& operands) {
  return {{}, {operands.x_exponents, operands.w_exponents}};
}

template <class Config>
void run_split_moments(MomentsParams const& p, cudaStream_t stream) {
  using Moments = ColumnMoments<typename Config::template TileShape<cutlass::half_t>, float,
                                Config::kEpilogueWarps>;
  using Fusion = cutlass::epilogue::fusion::Sm90EVT<Moments, SplitDescale<Config>>;
  Kernel<Config, cutlass::half_t, float, Fusion>::launch(
      p.operands, p.u, p.ldu, {descale_arguments<Config>(p.operands), {p.partials}}, stream);
}

template <class Config>
void run_split_inference(InferenceParams const& p, cudaStream_t stream) {
  using Affine = FoldedBatchNorm<typename Config::template TileShape<cutlass::half_t>,
                                 Config::kEpilogueWarps>;
  using Fusion = cutlass::epilogue::fusion::Sm90EVT<Affine, SplitDescale<Config>>;
  Kernel<Config, cutlass::half_t, float, Fusion>::launch(
      p.operands, p.y, p.ldy, {descale_arguments<Config>(p.operands), {p.layer}}, stream);
}

template <class Config>
void run_split_product(ProductParams const& p, cudaStream_t stream) {
  Kernel<Config, cutlass::half_t, float, SplitDescale<Config>>::launch(
      p.operands, p.out, p.ldo, descale_arguments<Config>(p.operands), stream);
}

}  // namespace cutlass_bn::gemm
