// One call of kernels on a device: a Queue on a stream of the caller's.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "cuda/device.h"
#include "kernels/cuda/queue.h"

namespace fedcore::cuda {

// What calls on a device need beside their arrays: tables that kernels read, partial sums, and a place for results. It
// grows to what the largest call has needed, and is never given back, so that a round allocates nothing.
class Workspace {
  public:
    static Workspace& of(Device& device);

    // Begins a call: waits until the tables of the call before last have been read.
    void begin();
    Queue::Memory table(std::size_t bytes);
    void* scratch(std::size_t bytes);
    // Copies what was written to tables since the last time.
    void send(Stream stream);
    // Ends a call, whose tables are read once the stream has come here.
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
    Tables tables_[2];  // written while the kernels of the call before still read the others
    int turn_ = 0;
    std::vector<Chunk> scratch_;
    std::unique_ptr<PinnedMemory> results_;
};

// It holds the device's turn while it lives.
class Call final : public Queue {
  public:
    // others: streams of others. The call runs behind what is on them so far, and what comes there later behind the
    // call: memory that its owner reuses in the order of his stream is not taken from under it.
    Call(Device& device, Stream stream, std::vector<Stream> others);
    ~Call() override;
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    Stream stream() const { return stream_; }
    // Those of the others that are there no more.
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
