#include "linear_bn/gemm/kernel.h"

namespace cutlass_bn::gemm {
template void run_split_product<SplitLargeConfig>(ProductParams const&, cudaStream_t);
}
