#include "linear_bn/gemm/kernel.h"

namespace cutlass_bn::gemm {
template void run_moments<MediumConfig, DType::kFloat16>(MomentsParams const&, cudaStream_t);
}
