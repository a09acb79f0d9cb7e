// The image for GPUs that is part of the module: what cuModuleLoadData takes.
#pragma once

#include <cstddef>

namespace fedcore::cuda {

struct Image {
    const void* begin;  // null where there is none
    std::size_t bytes;
    const char* targets;  // what it was compiled for, "sm_90 compute_75"; empty where there is none
    const char* missing;  // why there is none, "nvcc was not found"; else empty
};

Image image();

}  // namespace fedcore::cuda
