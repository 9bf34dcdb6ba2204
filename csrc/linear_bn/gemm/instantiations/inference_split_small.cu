#include "linear_bn/gemm/kernel.h"

namespace cutlass_bn::gemm {
template void run_split_inference<SplitSmallConfig>(InferenceParams const&, cudaStream_t);
}
