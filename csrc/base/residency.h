// The limit of the pages of mapped files that a process keeps in memory. Kernels count the bytes that they read and
// write. Before these exceed the limit, they let all pages of mapped files go: the pages stay in the system's cache and
// in the files, so no number changes.
#pragma once

#include <atomic>
#include <cstdint>

namespace fedcore {

inline std::atomic<std::int64_t> resident_limit{0};  // bytes; 0: no limit

// Lets the pages of all mapped files go. May throw.
using LetGo = void (*)();
inline std::atomic<LetGo> let_go{nullptr};

// Counts bytes before they are read or written.
inline void count_traffic(std::int64_t bytes, std::int64_t limit) {
    static std::atomic<std::int64_t> counted{0};
    if (counted.fetch_add(bytes, std::memory_order_relaxed) + bytes <= limit) return;
    counted.store(bytes, std::memory_order_relaxed);
    if (const LetGo call = let_go.load(std::memory_order_relaxed)) call();
}

}  // namespace fedcore
