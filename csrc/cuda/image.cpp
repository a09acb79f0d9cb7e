#include "cuda/image.h"

#if defined(FEDCORE_CUDA_IMAGE)
// The file's bytes, between two labels that no other object sees.
__asm__(
    ".pushsection .rodata\n"
    ".balign 64\n"
    "fedcore_cuda_image_begin:\n"
    ".incbin \"" FEDCORE_CUDA_IMAGE
    "\"\n"
    "fedcore_cuda_image_end:\n"
    ".popsection\n");
extern "C" {
[[gnu::visibility("hidden")]] extern const unsigned char fedcore_cuda_image_begin[];
[[gnu::visibility("hidden")]] extern const unsigned char fedcore_cuda_image_end[];
}
#endif

namespace fedcore::cuda {

Image image() {
#if defined(FEDCORE_CUDA_IMAGE)
    return {fedcore_cuda_image_begin, static_cast<std::size_t>(fedcore_cuda_image_end - fedcore_cuda_image_begin),
            FEDCORE_CUDA_TARGETS, ""};
#else
    return {nullptr, 0, "", FEDCORE_CUDA_MISSING};
#endif
}

}  // namespace fedcore::cuda
