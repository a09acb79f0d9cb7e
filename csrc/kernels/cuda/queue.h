// Where calls of kernels go, one after another: a stream of a device, or in tests the host that runs them itself.
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

// The kernel so many places behind another in kernels.def.
inline Kernel behind(Kernel first, int places) {
    return static_cast<Kernel>(static_cast<int>(first) + places);
}

struct Grid {
    std::int64_t x, y = 1;
    std::size_t shared_bytes = 0;  // beside what the kernel itself declares
};

class Queue {
  public:
    virtual ~Queue() = default;

    // A new call begins: what the call before had of tables and scratch may be taken again behind its launches.
    virtual void begin() = 0;

    // The same bytes twice: the host writes what it finds at `host` before the next launch, from which on kernels read
    // it at `device`.
    struct Memory {
        void *host, *device;
    };
    virtual Memory table(std::size_t bytes) = 0;
    // Memory for kernels alone; what it holds is undefined.
    virtual void* scratch(std::size_t bytes) = 0;

    // `call` is the kernel's only argument, and read at once.
    virtual void launch(Kernel kernel, const Grid& grid, const void* call) = 0;
    // Waits for all launches before, and copies.
    virtual void read(const void* device, std::size_t bytes, void* host) = 0;
};

}  // namespace fedcore::cuda
