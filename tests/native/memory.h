// Arrays without memory after them, so that a read past the end is detected.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <map>
#include <utility>
#include <vector>

#include "check.h"

namespace fedcore::test {

// Where an array lies. On the heap it ends where its allocation ends, which ASan watches, and starts `offset` bytes
// into a cache line; the other two are next to an unreadable page, which needs no sanitizer, nor code that was
// compiled for one. A prefetch of either is harmless, as it is of any address.
struct Place {
    enum Kind { heap, before_guard, behind_guard } kind;
    std::size_t offset;

    // Places enough that arrays next to each other in a call start at different offsets of a line and of a vector.
    static Place number(std::size_t i) {
        constexpr std::size_t kOffsets[] = {0, 8, 24, 56, 16, 40};
        return i % 3 == 0   ? Place{before_guard, 0}
               : i % 3 == 1 ? Place{heap, kOffsets[i / 3 % 6]}
                            : Place{behind_guard, 0};
    }
};

// Ranges of unreadable pages. A returned range becomes unreadable again, and is reused later with its old contents: new
// pages of zeros for every array would take as long as the tests themselves.
class Guarded {
  public:
    static char* take(std::size_t length) {
        std::vector<char*>& free = free_of(length);
        if (!free.empty()) {
            char* start = free.back();
            free.pop_back();
            return start;
        }
        void* memory = mmap(nullptr, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(memory != MAP_FAILED);
        return static_cast<char*>(memory);
    }
    static void give_back(char* start, std::size_t length) {
        CHECK(mprotect(start, length, PROT_NONE) == 0);
        free_of(length).push_back(start);
    }

  private:
    static std::vector<char*>& free_of(std::size_t length) {
        static std::map<std::size_t, std::vector<char*>> free;
        return free[length];
    }
};

// n elements of T, as fill() leaves them; before that undefined.
template <class T>
class Array {
  public:
    Array(std::int64_t n, Place place) : n_(n), kind_(place.kind) {
        const std::size_t bytes = static_cast<std::size_t>(n) * sizeof(T);
        if (kind_ == Place::heap) {
            // 4 bytes beside it for the odd elements of float: offsets are multiples of 8, as double needs them.
            const std::size_t shift = place.offset + (sizeof(T) == 4 ? 4 : 0);
            void* memory = nullptr;
            CHECK(posix_memalign(&memory, 64, shift + bytes + (shift + bytes == 0)) == 0);
            start_ = static_cast<char*>(memory);
            data_ = reinterpret_cast<T*>(start_ + shift);
            return;
        }
        const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
        const std::size_t used = (bytes + page - 1) / page * page;
        length_ = used + 2 * page;
        start_ = Guarded::take(length_);
        CHECK(used == 0 || mprotect(start_ + page, used, PROT_READ | PROT_WRITE) == 0);
        data_ = reinterpret_cast<T*>(start_ + page + (kind_ == Place::before_guard ? used - bytes : 0));
    }
    Array(Array&& other) noexcept
        : n_(other.n_),
          kind_(other.kind_),
          length_(other.length_),
          start_(std::exchange(other.start_, nullptr)),
          data_(other.data_) {}
    Array& operator=(Array&&) = delete;
    ~Array() {
        if (start_ == nullptr) return;
        if (kind_ == Place::heap)
            std::free(start_);
        else
            Guarded::give_back(start_, length_);
    }

    T* data() { return data_; }
    const T* data() const { return data_; }
    std::int64_t size() const { return n_; }
    T* begin() { return data_; }
    T* end() { return data_ + n_; }
    T& operator[](std::int64_t i) { return data_[i]; }
    const T& operator[](std::int64_t i) const { return data_[i]; }

  private:
    std::int64_t n_;
    Place::Kind kind_;
    std::size_t length_ = 0;
    char* start_ = nullptr;
    T* data_ = nullptr;
};

}  // namespace fedcore::test
