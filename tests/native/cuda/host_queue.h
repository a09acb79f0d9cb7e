// A queue whose kernels run on the host, one after another, each as it is launched.
#pragma once

#include <cstdlib>
#include <memory>
#include <vector>

#include "kernels/cuda/queue.h"

namespace fedcore::test {

class HostQueue final : public cuda::Queue {
  public:
    void begin() override { memory_.clear(); }
    Memory table(std::size_t bytes) override;
    void* scratch(std::size_t bytes) override { return table(bytes).device; }
    void launch(cuda::Kernel kernel, const cuda::Grid& grid, const void* call) override;
    void read(const void* device, std::size_t bytes, void* host) override;

  private:
    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };
    std::vector<std::unique_ptr<void, Free>> memory_;
    std::uint64_t order_ = 0;
};

}  // namespace fedcore::test
