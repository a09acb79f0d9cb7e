#include "host_queue.h"

#include <cstring>

#include "check.h"
#include "kernel_table.h"
#include "kernels/cuda/calls.h"

namespace fedcore::test {

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
    emulated_kernel(kernel).run(how, order_++, call);
}

void HostQueue::read(const void* device, std::size_t bytes, void* host) {
    std::memcpy(host, device, bytes);
}

}  // namespace fedcore::test
