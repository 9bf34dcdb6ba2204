#include "linear_bn/gemm/kernel.h"

namespace cutlass_bn::gemm {
template void run_moments<LargeConfig, DType::kFloat32>(MomentsParams const&, cudaStream_t);
}
