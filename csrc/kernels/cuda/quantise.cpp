#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"

namespace fedcore::cuda {
namespace {

// The codec's place in a family of three, of which f32 is none.
int place_of(Codec codec) {
    return static_cast<int>(codec) - static_cast<int>(Codec::bf16);
}

}  // namespace

void quantise(Queue& queue, const float* x, Codec codec, const DitherKey* key, std::int64_t n, void* codes,
              float* scales) {
    queue.begin();
    const CodesCall call{
        const_cast<float*>(x), {codec, codes, scales}, key != nullptr ? *key : DitherKey{}, n, are_aligned({x, codes})};
    const Kernel first = key != nullptr ? Kernel::quantise_bf16_dithered : Kernel::quantise_bf16;
    if (n > 0) queue.launch(behind(first, place_of(codec)), {tile_count(n)}, &call);
}

void dequantise(Queue& queue, const void* codes, const float* scales, Codec codec, std::int64_t n, float* out) {
    queue.begin();
    const CodesCall call{
        out, {codec, const_cast<void*>(codes), const_cast<float*>(scales)}, {}, n, are_aligned({codes, out})};
    if (n > 0) queue.launch(behind(Kernel::dequantise_bf16, place_of(codec)), {tile_count(n)}, &call);
}

}  // namespace fedcore::cuda
