// A GPU: its context, which torch and CuPy share, its kernels, its memory, and the order of its work.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/driver.h"
#include "kernels/cuda/queue.h"

namespace fedcore::cuda {

class Device {
  public:
    // Raises DeviceFailure. A device is opened once, for the process's life.
    static Device& get(int ordinal);

    const int ordinal;
    std::string name;
    int capability = 0;  // 90
    std::size_t memory = 0;

    void* context() const { return context_; }
    Function kernel(Kernel kernel) const { return kernels_[static_cast<std::size_t>(kernel)]; }

    // Calls on a device take turns, from all threads and streams, and run in that order, so that the next call can
    // reuse the memory of the one before.
    std::mutex turn;
    // Within a turn: later work on the stream runs after all earlier calls and all joined events.
    void follow(Stream stream);
    // Within a turn: the next call runs after the work that is on the stream so far.
    void passed(Stream stream);
    // Within a turn: later work on the stream, which no call uses, runs after all earlier calls.
    void precede(Stream stream);
    // Within a turn: the next call also runs after this event.
    void join(Event event);

  private:
    explicit Device(int ordinal);
    void load();

    int device_ = 0;
    void *context_ = nullptr, *module_ = nullptr;
    std::vector<Function> kernels_;
    Stream last_stream_ = nullptr;
    Event last_ = nullptr;
    bool any_ = false;
    std::vector<Event> joined_;
};

// The device's primary context is current for this thread in this scope.
class Current {
  public:
    explicit Current(const Device& device);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
};

// The ordinal of the device that owns an address. Raises DeviceFailure if none does.
int device_of(const void* address);

Event make_event();
// Later work on the first stream runs after the work that is on the second so far. If the second was destroyed, the
// host waits for all work. Returns whether the second exists. Needs a scope of Current.
bool wait_for(Stream stream, Stream other);

// Memory on a device. It is freed after all work that was queued before: cuMemFree waits for it.
class Memory {
  public:
    Memory(Device& device, std::size_t bytes);
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    Device& device;
    const std::size_t bytes;
    const Address at;
    // Registers another library's stream that may read and write the memory from now on. Calls that use the memory wait
    // for that stream, until no other library holds the memory and one call has waited. Needs the GIL, as all uses of
    // `users` do.
    void used_by(Stream stream);
    void no_longer_used_by(Stream stream);
    void forget_users();
    std::vector<Stream> users;
    std::atomic<int> shown{0};  // the number of other holders, which release it without the GIL
};

// Memory of the host that the device reads and writes directly.
class PinnedMemory {
  public:
    PinnedMemory(const Device& device, std::size_t bytes);
    ~PinnedMemory();
    PinnedMemory(const PinnedMemory&) = delete;
    PinnedMemory& operator=(const PinnedMemory&) = delete;

    char* at() const { return static_cast<char*>(at_); }
    const std::size_t bytes;

  private:
    const Device& device_;
    void* at_ = nullptr;
};

// Existing memory of the host that the device reads and writes directly in this scope.
class PinnedRegion {
  public:
    PinnedRegion(const Device& device, void* at, std::size_t bytes);
    ~PinnedRegion();
    PinnedRegion(const PinnedRegion&) = delete;
    PinnedRegion& operator=(const PinnedRegion&) = delete;

  private:
    const Device& device_;
    void* const at_;
};

}  // namespace fedcore::cuda
