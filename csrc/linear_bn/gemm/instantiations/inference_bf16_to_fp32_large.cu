#include "linear_bn/gemm/kernel.h"

namespace cutlass_bn::gemm {
template void run_inference<LargeConfig, DType::kBFloat16, DType::kFloat32>(InferenceParams const&,
                                                                            cudaStream_t);
}
