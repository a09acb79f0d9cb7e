#include "memory.h"

#include <cstdio>
#include <cstdlib>

namespace fake_cuda {

bool Allocations::add(std::size_t bytes, Stretch* made) {
    *made = take_pages(bytes);
    if (made->at == nullptr) return false;
    all.emplace(made->at, *made);
    bytes_ += bytes;
    return true;
}

bool Allocations::remove(const void* at) {
    const auto found = all.find(static_cast<const char*>(at));
    if (found == all.end()) return false;
    drop_pages(found->second);
    bytes_ -= found->second.bytes;
    all.erase(found);
    return true;
}

const Stretch* Allocations::find(const void* at, std::size_t bytes) const {
    auto found = all.upper_bound(static_cast<const char*>(at));
    if (found == all.begin()) return nullptr;
    --found;
    return found->second.holds(static_cast<const char*>(at), bytes) ? &found->second : nullptr;
}

DeviceMemory* DeviceMemory::opened_ = nullptr;

void DeviceMemory::open_all() {
    if (opened_ == this) return;
    close_opened();
    for (const auto& [at, stretch] : allocations.all) open_pages(stretch);
    opened_ = this;
}

void DeviceMemory::check(const std::string& who) const {
    for (const auto& [at, stretch] : allocations.all)
        if (!is_intact(stretch)) {
            std::fprintf(stderr, "fake CUDA: %s wrote beside the %zu bytes at %p\n", who.c_str(), stretch.bytes,
                         static_cast<const void*>(at));
            std::abort();
        }
}

void DeviceMemory::close_opened() {
    if (opened_ == nullptr) return;
    for (const auto& [at, stretch] : opened_->allocations.all) close_pages(stretch);
    opened_ = nullptr;
}

DeviceMemory::Opened::Opened(const DeviceMemory& memory, Address at, std::size_t bytes)
    : one_(&memory == opened_ ? nullptr : memory.allocations.find(reinterpret_cast<const void*>(at), bytes)) {
    if (one_ != nullptr) open_pages(*one_);
}

DeviceMemory::Opened::~Opened() {
    if (one_ != nullptr) close_pages(*one_);
}

}  // namespace fake_cuda
