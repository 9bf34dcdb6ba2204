// A layer's own vectors and scalars.
#pragma once

#include "common/activation.h"
#include "common/channel_vector.h"

namespace cutlass_bn {

// y = activation(BatchNorm(scale * (u + bias))), over the channels of u. In training the statistics
// are the batch's.
struct Layer {
  ChannelVector bias, scale;                // [channels]; absent: 0, 1
  ChannelVector running_mean, running_var;  // [channels]; of eval alone
  ChannelVector gamma, beta;                // [channels]; absent: 1, 0
  double eps = 1e-5;
  Activation activation = Activation::kNone;
};

}  // namespace cutlass_bn
