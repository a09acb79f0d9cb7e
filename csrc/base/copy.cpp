#include "base/copy.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#    include <emmintrin.h>
#endif

#include "base/blocks.h"
#include "base/cached.h"

namespace fedcore {
namespace {

constexpr std::int64_t kStretch = 256 << 10;  // consecutive bytes that one thread copies
constexpr std::int64_t kLarge = 4 << 20;      // bytes; NumPy asks for huge pages from the same size on

namespace past_caches {
#include "base/past_caches.inl"
}

}  // namespace

void copy_all(const std::vector<Copy>& copies) {
    std::vector<Copy> stretches;
    std::int64_t total = 0;
    for (const Copy& copy : copies) {
        for (std::int64_t at = 0; at < copy.bytes; at += kStretch)
            stretches.push_back({copy.to + at, copy.from + at, std::min(kStretch, copy.bytes - at)});
        total += copy.bytes;
    }
    const bool leaves_caches = past_caches::kHasPastCaches && 2 * total > cached_bytes();
    for_pieces(static_cast<std::int64_t>(stretches.size()), 2 * total, [&](std::int64_t piece) {
        const Copy& copy = stretches[piece];
        if (leaves_caches) {
            past_caches::put(copy.from, copy.bytes, copy.to);
            past_caches::fence();
        } else {
            std::memcpy(copy.to, copy.from, static_cast<std::size_t>(copy.bytes));
        }
    });
}

void ask_for_huge_pages(char* begin, std::int64_t bytes) {
#ifdef MADV_HUGEPAGE
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(begin), first = (at + page - 1) / page * page;
    const std::uintptr_t last = (at + bytes) / page * page;
    if (bytes >= kLarge)
        madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // if this fails, small pages
#endif
}

}  // namespace fedcore
