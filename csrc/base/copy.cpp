#include "base/copy.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#    include <emmintrin.h>
#endif

#include "base/blocks.h"

namespace fedcore {
namespace {

constexpr std::int64_t kStretch = 256 << 10;    // consecutive bytes that one thread copies
constexpr std::int64_t kLarge = 4 << 20;        // bytes from which NumPy, too, asks for huge pages
constexpr std::int64_t kPastCaches = 16 << 20;  // bytes of which little would stay in a cache until somebody reads them

// A copy past the caches: what is to be written is not read first, which memcpy does for a stretch of this length.
void stream(char* to, const char* from, std::int64_t bytes) {
#if defined(__SSE2__)
    constexpr std::int64_t kLine = 64;
    const std::int64_t first = std::min<std::int64_t>(-reinterpret_cast<std::uintptr_t>(to) % kLine, bytes);
    std::memcpy(to, from, static_cast<std::size_t>(first));
    std::int64_t at = first;
    for (; at + kLine <= bytes; at += kLine) {
        __m128i line[4];
        std::memcpy(line, from + at, kLine);
        auto* const there = reinterpret_cast<__m128i*>(to + at);
        for (int i = 0; i < 4; ++i) _mm_stream_si128(there + i, line[i]);
    }
    std::memcpy(to + at, from + at, static_cast<std::size_t>(bytes - at));
    _mm_sfence();
#else
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
#endif
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
    for_pieces(static_cast<std::int64_t>(stretches.size()), 2 * total, [&](std::int64_t piece) {
        const Copy& copy = stretches[piece];
        if (total >= kPastCaches)
            stream(copy.to, copy.from, copy.bytes);
        else
            std::memcpy(copy.to, copy.from, static_cast<std::size_t>(copy.bytes));
    });
}

void ask_for_huge_pages(char* begin, std::int64_t bytes) {
#ifdef MADV_HUGEPAGE
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(begin), first = (at + page - 1) / page * page;
    const std::uintptr_t last = (at + bytes) / page * page;
    if (bytes >= kLarge) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // fails: small ones
#endif
}

}  // namespace fedcore
