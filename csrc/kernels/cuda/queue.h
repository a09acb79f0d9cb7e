// A queue of kernel calls: a device's stream, or in tests the host, which runs them itself.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fedcore::cuda {

enum class Kernel : int {
#define FEDCORE_KERNEL(NAME, CALL, MEMORY, BODY, BLOCKS) NAME,
#include "kernels/cuda/kernels.def"
#undef FEDCORE_KERNEL
    count
};

// The kernel `places` after another in kernels.def.
inline Kernel behind(Kernel first, int places) {
    return static_cast<Kernel>(static_cast<int>(first) + places);
}

struct Grid {
    std::int64_t x, y = 1;
    std::size_t shared_bytes = 0;  // beside the kernel's static shared memory
};

class Queue {
  public:
    virtual ~Queue() = default;

    // Begins a new call, which may reuse the tables and scratch of the call before after its launches.
    virtual void begin() = 0;

    // Two copies of the same bytes: the host writes `host` before the next launch, and kernels then read `device`.
    struct Memory {
        void *host, *device;
    };
    virtual Memory table(std::size_t bytes) = 0;
    // Uninitialised memory for kernels.
    virtual void* scratch(std::size_t bytes) = 0;

    // `call` is the kernel's only argument, and read at once.
    virtual void launch(Kernel kernel, const Grid& grid, const void* call) = 0;
    // Waits for all earlier launches and copies.
    virtual void read(const void* device, std::size_t bytes, void* host) = 0;
};

}  // namespace fedcore::cuda
