#include "kernel_table.h"

#include "kernels/cuda/calls.h"

namespace fedcore::cuda {
#define FEDCORE_KERNEL(NAME, CALL, MEMORY, BODY, BLOCKS) extern "C" void fedcore_##NAME(const CALL call);
#include "kernels/cuda/kernels.def"
#undef FEDCORE_KERNEL
}  // namespace fedcore::cuda

namespace fedcore::test {
namespace {

using namespace cuda;

constexpr EmulatedKernel kKernels[] = {
#define FEDCORE_KERNEL(NAME, CALL, MEMORY, BODY, BLOCKS)                                                          \
    {"fedcore_" #NAME, sizeof(CALL), [](const cuda_on_host::Launch& how, std::uint64_t order, const void* call) { \
         cuda_on_host::launch(how, order, fedcore_##NAME, *static_cast<const CALL*>(call));                       \
     }},
#include "kernels/cuda/kernels.def"
#undef FEDCORE_KERNEL
};

}  // namespace

const EmulatedKernel& emulated_kernel(Kernel kernel) {
    return kKernels[static_cast<int>(kernel)];
}

const EmulatedKernel* find_emulated_kernel(std::string_view name) {
    for (const EmulatedKernel& kernel : kKernels)
        if (name == kernel.name) return &kernel;
    return nullptr;
}

}  // namespace fedcore::test
