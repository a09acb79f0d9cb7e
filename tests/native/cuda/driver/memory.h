// A device's memory, and pinned memory of the host's.
#pragma once

#include <map>
#include <string>

#include "functions.h"
#include "pages.h"

namespace fake_cuda {

// Stretches by address.
class Allocations {
  public:
    bool add(std::size_t bytes, Stretch* made);
    bool remove(const void* at);  // false if none begins there
    // The one that holds all of these bytes, or null.
    const Stretch* find(const void* at, std::size_t bytes) const;
    std::size_t bytes() const { return bytes_; }

    std::map<const char*, Stretch> all;

  private:
    std::size_t bytes_ = 0;
};

// A device's memory is accessible only within a copy or a kernel.
class DeviceMemory {
  public:
    ~DeviceMemory() = default;

    Allocations allocations;

    // What a kernel may touch: all of it. Open until it is closed, so that kernels that follow one another find it so.
    void open_all();
    // Ends the process if a write went beside an allocation; `who` is to blame.
    void check(const std::string& who) const;
    static void close_opened();

    // One allocation, within this scope.
    class Opened {
      public:
        Opened(const DeviceMemory& memory, Address at, std::size_t bytes);
        ~Opened();
        Opened(const Opened&) = delete;
        Opened& operator=(const Opened&) = delete;

      private:
        const Stretch* one_;
    };

  private:
    static DeviceMemory* opened_;
};

}  // namespace fake_cuda
