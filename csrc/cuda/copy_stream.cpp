#include "cuda/copy_stream.h"

#include <algorithm>
#include <cstring>

namespace fedcore::cuda {
namespace {

constexpr unsigned kNonBlocking = 1;  // it does not wait for the legacy default stream

}  // namespace

CopyStream::CopyStream(Device& beside, std::size_t buffer_bytes) : device(beside) {
    const Current current(device);
    for (Buffer& buffer : buffers_) buffer.memory = std::make_unique<PinnedMemory>(device, buffer_bytes);
    for (Buffer& buffer : buffers_) buffer.done = make_event();
    check(driver().cuStreamCreate(&stream_, kNonBlocking), "making a stream");
}

CopyStream::~CopyStream() {
    try {
        const Current current(device);
        driver().cuStreamSynchronize(stream_);
        driver().cuStreamDestroy(stream_);
        for (const Buffer& buffer : buffers_) driver().cuEventDestroy(buffer.done);
    } catch (const DeviceFailure&) {
        // The process can no longer use the GPU.
    }
}

// The next buffer, after its last copy has ended.
CopyStream::Buffer& CopyStream::next() {
    turn_ = 1 - turn_;
    finish(buffers_[turn_]);
    return buffers_[turn_];
}

void CopyStream::finish(Buffer& buffer) {
    if (!buffer.busy) return;
    check(driver().cuEventSynchronize(buffer.done), "waiting for a copy");
    if (buffer.to != nullptr) std::memcpy(buffer.to, buffer.memory->at(), buffer.bytes);
    buffer.busy = false;
}

// Later work on the stream runs after the kernel calls so far, and after other uses of the memory.
void CopyStream::begin(const std::vector<Stream>& users) {
    const std::lock_guard<std::mutex> turn(device.turn);
    device.precede(stream_);
    for (const Stream user : users)
        if (user != stream_) wait_for(stream_, user);
}

void CopyStream::upload(const char* from, bool pinned, Memory& to, std::size_t offset, std::size_t bytes,
                        const std::vector<Stream>& users) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Current current(device);
    begin(users);
    if (pinned) {
        direct_ = true;
        check(driver().cuMemcpyHtoDAsync(to.at + offset, from, bytes, stream_), "copying to the GPU");
        return;
    }
    for (std::size_t at = 0; at < bytes;) {
        Buffer& buffer = next();
        const std::size_t some = std::min(bytes - at, buffer.memory->bytes);
        std::memcpy(buffer.memory->at(), from + at, some);
        check(driver().cuMemcpyHtoDAsync(to.at + offset + at, buffer.memory->at(), some, stream_),
              "copying to the GPU");
        check(driver().cuEventRecord(buffer.done, stream_), "recording an event");
        buffer.busy = true, buffer.to = nullptr;
        at += some;
    }
}

void CopyStream::download(Memory& from, std::size_t offset, char* to, bool pinned, std::size_t bytes,
                          const std::vector<Stream>& users) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Current current(device);
    begin(users);
    if (pinned) {
        direct_ = true;
        check(driver().cuMemcpyDtoHAsync(to, from.at + offset, bytes, stream_), "copying from the GPU");
        return;
    }
    for (std::size_t at = 0; at < bytes;) {
        Buffer& buffer = next();
        const std::size_t some = std::min(bytes - at, buffer.memory->bytes);
        check(driver().cuMemcpyDtoHAsync(buffer.memory->at(), from.at + offset + at, some, stream_),
              "copying from the GPU");
        check(driver().cuEventRecord(buffer.done, stream_), "recording an event");
        buffer.busy = true, buffer.to = to + at, buffer.bytes = some;
        at += some;
    }
}

void CopyStream::join() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Current current(device);
    const std::lock_guard<std::mutex> turn(device.turn);
    const Event event = make_event();
    check(driver().cuEventRecord(event, stream_), "recording an event");
    device.join(event);
}

void CopyStream::wait() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Current current(device);
    finish(buffers_[1 - turn_]);
    finish(buffers_[turn_]);
    if (direct_) check(driver().cuStreamSynchronize(stream_), "waiting for a copy");
    direct_ = false;
}

}  // namespace fedcore::cuda
