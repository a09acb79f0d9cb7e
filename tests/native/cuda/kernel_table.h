// The emulated kernels, by what they are and by name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "cuda_on_host.h"
#include "kernels/cuda/queue.h"

namespace fedcore::test {

struct EmulatedKernel {
    const char* name;        // as the driver finds it in the image
    std::size_t call_bytes;  // of its only argument
    void (*run)(const cuda_on_host::Launch& how, std::uint64_t order, const void* call);
};

const EmulatedKernel& emulated_kernel(cuda::Kernel kernel);
const EmulatedKernel* find_emulated_kernel(std::string_view name);  // null if there is none

}  // namespace fedcore::test
