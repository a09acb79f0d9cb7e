// Memory in stretches of pages between inaccessible pages. An address is never reused.
#pragma once

#include <cstddef>

namespace fake_cuda {

struct Stretch {
    char* at;           // a multiple of 256, as the driver's are
    std::size_t bytes;  // up to where the last page ends, but for what makes `at` such a multiple

    bool holds(const char* address, std::size_t length) const {
        return at <= address && address <= at + bytes && length <= static_cast<std::size_t>(at + bytes - address);
    }
};

// All its bytes are 0xff, NaN in every dtype of numbers; they are inaccessible. Null if the system has none.
Stretch take_pages(std::size_t bytes);
// For good: an access from now on ends the process.
void drop_pages(const Stretch& stretch);
void open_pages(const Stretch& stretch);
void close_pages(const Stretch& stretch);
// Whether the bytes of its pages beside it are unchanged: no write went outside. Pages are open.
bool is_intact(const Stretch& stretch);

}  // namespace fake_cuda
