// A GPU: its context, which torch and CuPy share, its kernels and its memory; and the order of what is done on it.
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

    // Calls on a device take turns, from whatever thread and on whatever stream they come, and run in that order: the
    // memory that one call leaves is there for the next.
    std::mutex turn;
    // Within a turn: what comes on the stream runs behind all that was called before, and behind what is joined.
    void follow(Stream stream);
    // Within a turn: what is called next runs behind all that is on the stream so far.
    void passed(Stream stream);
    // Within a turn: what comes on the stream, which is no call's, runs behind all that was called before.
    void precede(Stream stream);
    // Within a turn: what is called next runs behind this event too.
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

// The ordinal of the device in whose memory this lies. Raises DeviceFailure if it lies in none's.
int device_of(const void* address);

Event make_event();
// What comes on the first stream runs behind all that is on the second so far; where that is there no more, behind all
// that there is, for which the host waits. Whether it is there. Within a scope of Current.
bool wait_for(Stream stream, Stream other);

// Memory on a device. Freed when everything that was queued before has run: cuMemFree waits for it.
class Memory {
  public:
    Memory(Device& device, std::size_t bytes);
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    Device& device;
    const std::size_t bytes;
    const Address at;
    // A stream of others, to which it is shown, may read and write it from now on: calls that use it wait for that
    // stream, until nobody else holds it and one has waited. With Python's lock held, as all that looks at `users`.
    void used_by(Stream stream);
    void no_longer_used_by(Stream stream);
    void forget_users();
    std::vector<Stream> users;
    std::atomic<int> shown{0};  // to how many others, who have not let it go; they do so without the lock
};

// Memory of the host that the device reads and writes by itself.
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

// Memory of the host's that is there already, and that the device reads and writes by itself in this scope.
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
