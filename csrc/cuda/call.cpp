#include "cuda/call.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "kernels/cuda/calls.h"

namespace fedcore::cuda {
namespace {

constexpr std::size_t kSmallest = 64 << 10;  // bytes of a chunk
constexpr std::size_t kAlignment = 256;      // the least alignment of the driver's allocations

std::size_t padded(std::size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

Workspace& Workspace::of(Device& device) {
    static auto& workspaces = *new std::map<int, std::unique_ptr<Workspace>>;  // never destroyed, as devices are not
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    std::unique_ptr<Workspace>& found = workspaces[device.ordinal];
    if (!found) found.reset(new Workspace(device));
    return *found;
}

Workspace::Workspace(Device& device) : device_(device) {
    for (Tables& tables : tables_) tables.read = make_event();
}

void Workspace::begin() {
    turn_ = 1 - turn_;
    Tables& tables = tables_[turn_];
    if (tables.waiting) check(driver().cuEventSynchronize(tables.read), "waiting for an earlier call");
    tables.waiting = false;
    for (Chunk& chunk : tables.chunks) chunk.used = chunk.sent = 0;
    for (Chunk& chunk : scratch_) chunk.used = 0;
}

Workspace::Chunk& Workspace::with_room(std::vector<Chunk>& chunks, std::size_t bytes, bool here) {
    for (Chunk& chunk : chunks)
        if (chunk.used + bytes <= chunk.there->bytes) return chunk;
    const std::size_t size = std::max({kSmallest, padded(bytes), chunks.empty() ? 0 : 2 * chunks.back().there->bytes});
    Chunk made;
    if (here) made.here = std::make_unique<PinnedMemory>(device_, size);
    made.there = std::make_unique<fedcore::cuda::Memory>(device_, size);
    chunks.push_back(std::move(made));
    return chunks.back();
}

Queue::Memory Workspace::table(std::size_t bytes) {
    Chunk& chunk = with_room(tables_[turn_].chunks, bytes, true);
    const std::size_t at = chunk.used;
    chunk.used = padded(at + bytes);
    return {chunk.here->at() + at, reinterpret_cast<char*>(chunk.there->at) + at};
}

void* Workspace::scratch(std::size_t bytes) {
    Chunk& chunk = with_room(scratch_, bytes, false);
    const std::size_t at = chunk.used;
    chunk.used = padded(at + bytes);
    return reinterpret_cast<char*>(chunk.there->at) + at;
}

void Workspace::send(Stream stream) {
    for (Chunk& chunk : tables_[turn_].chunks) {
        const std::size_t end = std::min(chunk.used, chunk.there->bytes);
        if (chunk.sent < end)
            check(driver().cuMemcpyHtoDAsync(chunk.there->at + chunk.sent, chunk.here->at() + chunk.sent,
                                             end - chunk.sent, stream),
                  "copying tables to the GPU");
        chunk.sent = std::max(chunk.sent, end);
    }
}

void Workspace::end(Stream stream) {
    Tables& tables = tables_[turn_];
    check(driver().cuEventRecord(tables.read, stream), "recording an event");
    tables.waiting = true;
}

void Workspace::read(const void* device, std::size_t bytes, void* host, Stream stream) {
    if (bytes == 0) return;
    if (results_ == nullptr || results_->bytes < bytes) {
        results_.reset();
        results_ = std::make_unique<PinnedMemory>(device_, std::max(kSmallest, padded(2 * bytes)));
    }
    check(driver().cuMemcpyDtoHAsync(results_->at(), reinterpret_cast<Address>(device), bytes, stream),
          "copying results from the GPU");
    check(driver().cuStreamSynchronize(stream), "running kernels");
    std::memcpy(host, results_->at(), bytes);
}

Call::Call(Device& device, Stream stream, std::vector<Stream> others)
    : device_(device),
      turn_(device.turn),
      current_(device),
      workspace_(Workspace::of(device)),
      stream_(stream),
      others_(std::move(others)) {
    device_.follow(stream_);
    for (const Stream other : others_)
        if (other != stream_ && !wait_for(stream_, other)) gone_.push_back(other);
    for (const Stream other : gone_) others_.erase(std::find(others_.begin(), others_.end(), other));
}

Call::~Call() {
    try {
        if (begun_) workspace_.end(stream_);
        device_.passed(stream_);
        for (const Stream other : others_) device_.precede(other);
    } catch (const DeviceFailure&) {
        // The next call fails with the same error, and reports it.
    }
}

void Call::begin() {
    if (begun_) workspace_.end(stream_);
    workspace_.begin();
    begun_ = true;
}

Queue::Memory Call::table(std::size_t bytes) {
    return workspace_.table(bytes);
}

void* Call::scratch(std::size_t bytes) {
    return workspace_.scratch(bytes);
}

void Call::launch(Kernel kernel, const Grid& grid, const void* call) {
    workspace_.send(stream_);
    if (grid.x > INT32_MAX || grid.y > 65535) throw DeviceFailure("starting a kernel: too many elements for one call");
    void* arguments[] = {const_cast<void*>(call)};
    check(
        driver().cuLaunchKernel(device_.kernel(kernel), static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), 1,
                                kThreads, 1, 1, static_cast<unsigned>(grid.shared_bytes), stream_, arguments, nullptr),
        "starting a kernel");
}

void Call::read(const void* device, std::size_t bytes, void* host) {
    workspace_.read(device, bytes, host, stream_);
}

}  // namespace fedcore::cuda
