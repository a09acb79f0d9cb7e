#include "base/cached.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>

namespace fedcore {
namespace {

// For a system that reports nothing, or, in a virtual machine, the size of a cache that many machines share.
constexpr std::int64_t kUsual = 24 << 20, kLeast = 8 << 20, kMost = 64 << 20;

std::int64_t last_cache() {
    long found = 0;
#ifdef _SC_LEVEL3_CACHE_SIZE
    found = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
    return found > 0 ? std::clamp<std::int64_t>(found / 4 * 3, kLeast, kMost) : kUsual;
}

std::atomic<std::int64_t> chosen{-1};  // until the first use

}  // namespace

std::int64_t cached_bytes() {
    std::int64_t bytes = chosen.load(std::memory_order_relaxed);
    if (bytes < 0) chosen.store(bytes = last_cache(), std::memory_order_relaxed);
    return bytes;
}

void set_cached_bytes(std::int64_t bytes) {
    chosen.store(bytes, std::memory_order_relaxed);
}

}  // namespace fedcore
