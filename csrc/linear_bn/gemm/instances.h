// What the files in instantiations/ define and dispatch.cpp calls: one GEMM kernel each. Free of
// CUTLASS.
#pragma once

#include "linear_bn/gemm/launch.h"

namespace cutlass_bn::gemm {

struct LargeConfig;
struct MediumConfig;
struct SmallConfig;
struct SplitLargeConfig;
struct SplitSmallConfig;

template <class Config, DType dtype>
void run_moments(MomentsParams const& params, cudaStream_t stream);

template <class Config, DType dtype, DType y_dtype>
void run_inference(InferenceParams const& params, cudaStream_t stream);

template <class Config>
void run_split_moments(MomentsParams const& params, cudaStream_t stream);

template <class Config>
void run_split_inference(InferenceParams const& params, cudaStream_t stream);

template <class Config>
void run_split_product(ProductParams const& params, cudaStream_t stream);

}  // namespace cutlass_bn::gemm
