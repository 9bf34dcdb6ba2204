// The second half of the portable and of the training forward: from u = x W^T to the layer's output. One kernel launch each.
#pragma once

#include "linear_bn/params.h"

namespace cutlass_bn::linear_bn {

// y = act((u - mean) * (gamma * scale * invstd) + beta), mean and invstd those of the batch.
void launch_normalize(NormalizeParams const& params, cudaStream_t stream);

// y = act((scale * u + (scale * bias - running_mean)) * (gamma / sqrt(running_var + eps)) + beta).
void launch_normalize_inference(NormalizeInferenceParams const& params, cudaStream_t stream);

}  // namespace cutlass_bn::linear_bn
