// The module's image for GPUs, in the form of cuModuleLoadData.
#pragma once

#include <cstddef>

namespace fedcore::cuda {

struct Image {
    const void* begin;  // null without an image
    std::size_t bytes;
    const char* targets;  // its targets, "sm_90 compute_75"; empty without an image
    const char* missing;  // the reason if there is no image, "nvcc was not found"; else empty
};

Image image();

}  // namespace fedcore::cuda
