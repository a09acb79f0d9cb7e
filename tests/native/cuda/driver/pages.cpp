#include "pages.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstring>

namespace fake_cuda {
namespace {

constexpr std::size_t kPage = 4096, kAligned = 256, kArena = std::size_t{256} << 30;

char* arena = nullptr;  // inaccessible addresses, from which stretches are taken in order
std::size_t used = kArena;

std::size_t rounded(std::size_t bytes, std::size_t unit) {
    return (bytes + unit - 1) / unit * unit;
}

struct Range {
    char *begin, *end;
};
Range pages_of(const Stretch& stretch) {
    char* const end = stretch.at + rounded(stretch.bytes, kAligned);
    return {end - rounded(stretch.bytes, kPage), end};
}

void protect(const Stretch& stretch, int how) {
    const Range pages = pages_of(stretch);
    mprotect(pages.begin, static_cast<std::size_t>(pages.end - pages.begin), how);
}

// Beside a stretch, as float32 and float64 huge: a NaN would often come out of arithmetic as it went in.
constexpr char kBeside = '\xfe';

bool is_untouched(const char* begin, const char* end) {
    const auto length = static_cast<std::size_t>(end - begin);
    return length == 0 || (*begin == kBeside && std::memcmp(begin, begin + 1, length - 1) == 0);
}

}  // namespace

Stretch take_pages(std::size_t bytes) {
    if (bytes > kArena / 2) return {nullptr, 0};
    const std::size_t length = rounded(bytes, kPage);
    if (used + length + 2 * kPage > kArena) {
        void* const memory = mmap(nullptr, kArena, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) return {nullptr, 0};
        arena = static_cast<char*>(memory);
        used = kPage;
    }
    const Stretch made{arena + used + length - rounded(bytes, kAligned), bytes};
    used += length + kPage;
    open_pages(made);
    std::memset(pages_of(made).begin, kBeside, length);
    std::memset(made.at, 0xff, bytes);
    close_pages(made);
    return made;
}

void drop_pages(const Stretch& stretch) {
    const Range pages = pages_of(stretch);
    madvise(pages.begin, static_cast<std::size_t>(pages.end - pages.begin), MADV_DONTNEED);
    close_pages(stretch);
}

void open_pages(const Stretch& stretch) {
    protect(stretch, PROT_READ | PROT_WRITE);
}

void close_pages(const Stretch& stretch) {
    protect(stretch, PROT_NONE);
}

bool is_intact(const Stretch& stretch) {
    const Range pages = pages_of(stretch);
    return is_untouched(pages.begin, stretch.at) && is_untouched(stretch.at + stretch.bytes, pages.end);
}

}  // namespace fake_cuda
