// The package's own threads. Not OpenMP: it clashes with torch's copy and hangs in a forked child.
//
// A call is a job. The caller and the workers claim its pieces one by one from a counter. If no worker gets a core
// (torch's threads spin for milliseconds after each operation), the caller does all pieces without waiting. Workers
// start at the first job that needs them and sleep between jobs. A forked child starts its own workers. Several threads
// may call at once; their jobs share the workers.
#pragma once

#include <cstdint>
#include <type_traits>

namespace fedcore {

using Task = void (*)(const void* context, std::int64_t piece);

// Runs task(context, piece) for every piece in [0, pieces). Returns when all are done; rethrows the first
// exception that a piece threw, after every claimed piece has ended. Pieces may run in any order and on any
// thread.
void parallel_for(std::int64_t pieces, Task task, const void* context);

template <class Body>
void parallel_for(std::int64_t pieces, const Body& body) {
    parallel_for(
        pieces, [](const void* context, std::int64_t piece) { (*static_cast<const Body*>(context))(piece); }, &body);
}

inline constexpr int kMostThreads = 4096;

// The number of threads that may work on one job, including the caller: FEDCORE_THREADS, else usable_cores(), read once
// at the first call unless set_threads was called before. Throws std::runtime_error if FEDCORE_THREADS is not a number
// in 1..kMostThreads.
int threads();
void set_threads(int count);  // 1..kMostThreads

}  // namespace fedcore
