#include "host_queue.h"

#include <cstring>

#include "check.h"
#include "cuda_on_host.h"
#include "kernels/cuda/calls.h"

namespace fedcore::cuda {
#define FEDCORE_KERNEL(NAME, CALL, MEMORY, BODY, BLOCKS) extern "C" void fedcore_##NAME(const CALL call);
#include "kernels/cuda/kernels.def"
#undef FEDCORE_KERNEL
}  // namespace fedcore::cuda

namespace fedcore::test {
namespace {

using Runner = void (*)(const cuda_on_host::Launch& how, std::uint64_t order, const void* call);

constexpr Runner kRunners[] = {
#define FEDCORE_KERNEL(NAME, CALL, MEMORY, BODY, BLOCKS)                                   \
    [](const cuda_on_host::Launch& how, std::uint64_t order, const void* call) {           \
        using namespace cuda;                                                              \
        cuda_on_host::launch(how, order, fedcore_##NAME, *static_cast<const CALL*>(call)); \
    },
#include "kernels/cuda/kernels.def"
#undef FEDCORE_KERNEL
};

}  // namespace

// Memory begins as NaN, and ends where its allocation ends, which ASan watches.
cuda::Queue::Memory HostQueue::table(std::size_t bytes) {
    void* memory = nullptr;
    CHECK(posix_memalign(&memory, 16, bytes == 0 ? 1 : bytes) == 0);
    std::memset(memory, 0xff, bytes);
    memory_.emplace_back(memory);
    return {memory, memory};
}

void HostQueue::launch(cuda::Kernel kernel, const cuda::Grid& grid, const void* call) {
    CHECK(grid.x > 0 && grid.y > 0);
    const cuda_on_host::Launch how{dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y)),
                                   dim3(cuda::kThreads), grid.shared_bytes};
    kRunners[static_cast<int>(kernel)](how, order_++, call);
}

void HostQueue::read(const void* device, std::size_t bytes, void* host) {
    std::memcpy(host, device, bytes);
}

}  // namespace fedcore::test
