// Products of matrices, by torch or by the kernels that float32 has here.
#pragma once

#include "linear_bn/policy.h"
#include "ops/tensor_args.h"

extern "C" __attribute__((weak)) AOTITorchError aoti_torch_cuda_mm_out(AtenTensorHandle out,
                                                                       AtenTensorHandle self,
                                                                       AtenTensorHandle mat2);
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_cuda_addmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat1,
                          AtenTensorHandle mat2, double beta, double alpha);

namespace cutlass_bn::ops {

linear_bn::MatrixView view_of(Tensor const& matrix);

// A view, without the dispatcher's detour. Not one to autograd.
Tensor transposed(Tensor const& matrix);

// [m, n] of like's dtype, in rows of whole 16-byte vectors, so that every n can be stored by TMA.
// Whole in memory: cuBLAS reads to the end of the last row.
Tensor empty_padded(int64_t m, int64_t n, Tensor const& like);

linear_bn::Fp32Products fp32_products_of(int64_t code);

// out = a b (+ bias, of out's dtype) by torch, which follows its own precision switches and handles
// every stride, and an empty K.
void multiply_by_torch(Tensor const& out, Tensor const& a, Tensor const& b,
                       std::optional<Tensor> const& bias);

// a b, contiguous, as precise as the layer's forward.
Tensor product(Tensor const& a, Tensor const& b, linear_bn::Fp32Products fp32_products);

}  // namespace cutlass_bn::ops
