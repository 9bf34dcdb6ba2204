#include "common/finalize.cuh"
#include "common/finalize_tiles.cuh"

namespace cutlass_bn {
namespace {

template <int kColumns>
__global__ void __launch_bounds__(kFinalizeThreads) finalize_kernel(FinalizeParams const p) {
  wait_for_previous_kernel();
  allow_next_kernel();
  FinalizeThread<kColumns> const thread;
  int64_t const channel = thread.channel;
  bool const valid = channel < p.channels;

  // The first threads will need these at the end: asked for now, they arrive meanwhile.
  FinalizeInputs inputs;
  if (valid && thread.slice == 0) inputs = load_inputs(p, channel);

  float const shift = valid ? p.partials[channel].x : 0.f;
  struct Tile {
    float2 partial;
    float remainder;
  };
  TileSums const sums = thread.template add_tiles<TileSums>(
      valid, p.tiles,
      [&](int64_t tile) {
        int64_t const at = tile * p.channels + channel;
        return Tile{p.partials[at], p.remainders != nullptr ? p.remainders[at] : 0.f};
      },
      [&](int64_t tile, Tile const& t) {
        int64_t const left = p.rows - tile * p.rows_per_tile;
        double const count = double(left < p.rows_per_tile ? left : p.rows_per_tile);
        double const delta = (double(t.partial.x) - double(shift)) + double(t.remainder);
        return tile_sums(count, delta, double(t.partial.y));
      });
  if (thread.slice == 0 && valid)
    store_stats(p, channel, channel_stats(p, double(shift), sums, inputs.scale), inputs);
}

__global__ void count_batch_kernel(int64_t* num_batches_tracked) {
  wait_for_previous_kernel();
  *num_batches_tracked += 1;
}

}  // namespace

void launch_count_batch(int64_t* num_batches_tracked, cudaStream_t stream) {
  launch_kernel(count_batch_kernel, dim3(1), dim3(1), 0, stream, num_batches_tracked);
}

void launch_count_after(FinalizeParams const& params, cudaStream_t stream) {
  if (params.cumulative && params.num_batches_tracked != nullptr)
    launch_count_batch(params.num_batches_tracked, stream);
}

void launch_finalize(FinalizeParams const& params, cudaStream_t stream) {
  launch_finalize_kernel(finalize_kernel<32>, finalize_kernel<8>, finalize_kernel<4>, params,
                         stream);
  launch_count_after(params, stream);
}

}  // namespace cutlass_bn
