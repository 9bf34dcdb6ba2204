// From sums over tiles to dgamma, dbeta, dscale and the coefficients of dx.
#include "batch_norm/gradient_finalize.cuh"
#include "batch_norm/kernels.h"
#include "common/finalize_tiles.cuh"

namespace cutlass_bn::batch_norm {
namespace {

template <int kColumns>
__global__ void __launch_bounds__(kFinalizeThreads)
    gradient_finalize_kernel(__grid_constant__ GradientFinalizeParams const p) {
  wait_for_previous_kernel();
  allow_next_kernel();
  FinalizeThread<kColumns> const thread;
  int64_t const channel = thread.channel;
  bool const valid = channel < p.channels;

  // The first threads will need these at the end: asked for now, they arrive meanwhile.
  GradientInputs inputs;
  if (valid && thread.slice == 0) inputs = load_inputs(p, channel);

  WideSums const sums = thread.template add_tiles<WideSums>(
      valid, p.tiles, [&](int64_t tile) { return p.partials[tile * p.channels + channel]; },
      [](int64_t, float2 partial) { return WideSums{double(partial.x), double(partial.y)}; });
  if (thread.slice == 0 && valid) store_gradients(p, channel, channel_gradients(p, sums, inputs));
}

}  // namespace

void launch_gradient_finalize(GradientFinalizeParams const& params, cudaStream_t stream) {
  CUTLASS_BN_CHECK((params.maps.main == nullptr && !params.dscale) || params.stats != nullptr,
                   "maps: expected stats, got none");
  launch_finalize_kernel(gradient_finalize_kernel<32>, gradient_finalize_kernel<8>,
                         gradient_finalize_kernel<4>, params, stream);
}

}  // namespace cutlass_bn::batch_norm
