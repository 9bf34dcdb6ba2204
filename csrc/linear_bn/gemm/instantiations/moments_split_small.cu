#include "linear_bn/gemm/kernel.h"

namespace cutlass_bn::gemm {
template void run_split_moments<SplitSmallConfig>(MomentsParams const&, cudaStream_t);
}
