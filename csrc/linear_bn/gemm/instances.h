// What the files in instantiations/ define and dispatch.cpp calls: one GEMM kernel each. Free of CUTLASS.
#pragma once

#include "linear_bn/gemm/launch.h"

namespace cutlass_bn::gemm {

struct LargeConfig;
struct MediumConfig;
struct SmallConfig;

template <class Config, DType dtype>
void run_moments(MomentsParams const& params, cudaStream_t stream);

template <class Config, DType dtype, DType y_dtype>
void run_inference(InferenceParams const& params, cudaStream_t stream);

}  // namespace cutlass_bn::gemm
