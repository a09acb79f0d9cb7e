// Copies of memory into memory by all threads.
#pragma once

#include <cstdint>
#include <vector>

namespace fedcore {

struct Copy {
    char* to;
    const char* from;
    std::int64_t bytes;
};

// Makes each of the copies, no two of which overlap.
void copy_all(const std::vector<Copy>& copies);

// Asks the system to back large fresh memory by huge pages: fresh memory costs a fault for each page, which takes more
// time than the copy.
void ask_for_huge_pages(char* begin, std::int64_t bytes);

}  // namespace fedcore
