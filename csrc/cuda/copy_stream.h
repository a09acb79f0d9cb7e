// Copies between host and device beside the kernels, through two pinned buffers: while one is on the bus, the host
// fills or empties the other.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "cuda/device.h"

namespace fedcore::cuda {

class CopyStream {
  public:
    CopyStream(Device& device, std::size_t buffer_bytes);
    ~CopyStream();
    CopyStream(const CopyStream&) = delete;
    CopyStream& operator=(const CopyStream&) = delete;

    // Begins after the calls so far, and after the work on the streams of the users of `to`. `from` is read before this
    // returns or, if it is pinned, by the device before the next work on this stream and before `wait` returns.
    void upload(const char* from, bool pinned, Memory& to, std::size_t offset, std::size_t bytes,
                const std::vector<Stream>& users);
    // Begins likewise; `to`, pinned or not, is complete after `wait`. The caller has registered the stream with `from`.
    void download(Memory& from, std::size_t offset, char* to, bool pinned, std::size_t bytes,
                  const std::vector<Stream>& users);
    // Later calls run after the uploads so far.
    void join();
    // Blocks until all copies are done.
    void wait();

    Device& device;
    Stream stream() const { return stream_; }

  private:
    struct Buffer {
        std::unique_ptr<PinnedMemory> memory;
        Event done = nullptr;
        bool busy = false;
        char* to = nullptr;  // the destination of a download's bytes
        std::size_t bytes = 0;
    };
    Buffer& next();
    void finish(Buffer& buffer);
    void begin(const std::vector<Stream>& users);

    std::mutex mutex_;  // one call at a time
    Stream stream_ = nullptr;
    Buffer buffers_[2];
    int turn_ = 0;
    bool direct_ = false;  // whether a copy from or to pinned memory may be under way
};

}  // namespace fedcore::cuda
