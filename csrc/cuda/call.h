// One call of kernels on a device: a Queue on one of the caller's streams.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "cuda/device.h"
#include "kernels/cuda/queue.h"

namespace fedcore::cuda {

// Memory of calls on a device beside their arrays: tables that kernels read, partial sums, and results. It grows to the
// need of the largest call and is never freed, so that a round allocates nothing.
class Workspace {
  public:
    static Workspace& of(Device& device);

    // Begins a call: waits until the tables of the call before last have been read.
    void begin();
    Queue::Memory table(std::size_t bytes);
    void* scratch(std::size_t bytes);
    // Copies the tables that were written since the last time.
    void send(Stream stream);
    // Ends a call; its tables have been read when the stream reaches this point.
    void end(Stream stream);
    void read(const void* device, std::size_t bytes, void* host, Stream stream);

  private:
    struct Chunk {
        std::unique_ptr<PinnedMemory> here;  // null for scratch
        std::unique_ptr<Memory> there;
        std::size_t used = 0, sent = 0;
    };
    struct Tables {
        std::vector<Chunk> chunks;
        Event read = nullptr;
        bool waiting = false;
    };
    explicit Workspace(Device& device);
    Chunk& with_room(std::vector<Chunk>& chunks, std::size_t bytes, bool here);

    Device& device_;
    Tables tables_[2];  // written while the kernels of the call before still read the other
    int turn_ = 0;
    std::vector<Chunk> scratch_;
    std::unique_ptr<PinnedMemory> results_;
};

// It holds the device's turn during its lifetime.
class Call final : public Queue {
  public:
    // others: other streams. The call runs after the work that is on them so far, and their later work runs after the
    // call, so an owner that reuses memory in its stream's order cannot overwrite memory that the call still uses.
    Call(Device& device, Stream stream, std::vector<Stream> others);
    ~Call() override;
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    Stream stream() const { return stream_; }
    // The other streams that were destroyed.
    const std::vector<Stream>& gone() const { return gone_; }

    void begin() override;
    Memory table(std::size_t bytes) override;
    void* scratch(std::size_t bytes) override;
    void launch(Kernel kernel, const Grid& grid, const void* call) override;
    void read(const void* device, std::size_t bytes, void* host) override;

  private:
    Device& device_;
    const std::lock_guard<std::mutex> turn_;
    const Current current_;
    Workspace& workspace_;
    const Stream stream_;
    std::vector<Stream> others_, gone_;
    bool begun_ = false;
};

}  // namespace fedcore::cuda
