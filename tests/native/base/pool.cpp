// The pool among several callers, exceptions, nested calls, changing thread counts and workers that do not come.
#include "base/pool.h"

#include <sys/resource.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/blocks.h"
#include "check.h"

using namespace fedcore;

namespace {

// A call's pieces, each of which must be run once.
class Tally {
  public:
    explicit Tally(std::int64_t pieces) : runs_(static_cast<std::size_t>(pieces)) {}
    void run(std::int64_t piece) { ++runs_[static_cast<std::size_t>(piece)]; }
    bool each_once() const {
        for (const int runs : runs_)
            if (runs != 1) return false;
        return true;
    }

  private:
    std::vector<int>
        runs_;  // no atomics: what two threads wrote to would be a race, and the caller reads it behind all
};

void call(std::int64_t pieces) {
    Tally tally(pieces);
    parallel_for(pieces, [&](std::int64_t piece) { tally.run(piece); });
    CHECK(tally.each_once());
}

// The most memory that the process ever had.
long resident_kib() {
    rusage usage;
    CHECK(getrusage(RUSAGE_SELF, &usage) == 0);
    return usage.ru_maxrss;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr long kAllowedKib = 1 << 30;  // they keep freed memory for a while
#else
constexpr long kAllowedKib = 8 << 10;
#endif

template <class Body>
void on_callers(int callers, const Body& body) {
    std::vector<std::thread> all;
    for (int caller = 0; caller < callers; ++caller) all.emplace_back(body, caller);
    for (std::thread& caller : all) caller.join();
}

}  // namespace

TEST(every_piece_is_run_once) {
    for (const int count : {1, 2, 3, 7, 64}) {
        set_threads(count);
        for (const std::int64_t pieces : {0, 1, 2, 3, 7, 8, 1000}) call(pieces);
    }
}

TEST(blocks_cover_every_element_once) {
    set_threads(3);
    for (const std::int64_t n : {std::int64_t{0}, std::int64_t{1}, kBlock - 1, kBlock, kBlock + 1, 10 * kBlock + 7})
        for (const std::int64_t bytes : {std::int64_t{0}, kSerialBytes - 1, kSerialBytes}) {
            Tally tally(n);
            for_blocks(n, bytes, [&](std::int64_t block, std::int64_t begin, std::int64_t end) {
                CHECK(begin == block * kBlock && begin < end);
                for (std::int64_t j = begin; j < end; ++j) tally.run(j);
            });
            CHECK(tally.each_once());
        }
}

TEST(many_callers_at_once) {
    for (const int count : {1, 2, 3, 7}) {
        set_threads(count);
        on_callers(8, [](int caller) {
            for (int i = 0; i < 200; ++i) call(1 + (caller * 31 + i) % 50);
        });
    }
}

TEST(exceptions_reach_their_caller_and_no_other) {
    for (const int count : {1, 2, 3, 7}) {
        set_threads(count);
        on_callers(4, [](int caller) {
            for (int i = 0; i < 100; ++i) {
                const std::string due = std::to_string(caller) + " " + std::to_string(i);
                std::string caught;
                try {
                    parallel_for(20, [&](std::int64_t piece) {
                        if (caller % 2 == 0 && piece % 7 == i % 7) throw std::runtime_error(due);
                    });
                } catch (const std::runtime_error& error) {
                    caught = error.what();
                }
                CHECK(caught == (caller % 2 == 0 ? due : ""));
                call(20);
            }
        });
    }
}

TEST(an_exception_does_not_leave_before_the_pieces_that_others_run) {
    set_threads(3);
    for (int i = 0; i < 200; ++i) {
        std::vector<int> memory(64);  // on the stack of the call, as an array of a binding is
        std::atomic<int> inside{0};
        try {
            parallel_for(64, [&](std::int64_t piece) {
                ++inside;
                for (int spin = 0; spin < 100; ++spin) memory[static_cast<std::size_t>(piece)] += spin;
                --inside;
                if (piece == 3) throw 7;
            });
            CHECK(false);
        } catch (int thrown) {
            CHECK(thrown == 7);
        }
        CHECK(inside == 0);
    }
}

TEST(a_piece_may_call_the_pool_itself) {
    for (const int count : {1, 2, 3, 7}) {
        set_threads(count);
        on_callers(3, [](int) {
            for (int i = 0; i < 20; ++i)
                parallel_for(5, [](std::int64_t) { parallel_for(4, [](std::int64_t) { call(3); }); });
        });
        bool caught = false;
        try {
            parallel_for(5, [](std::int64_t outer) {
                parallel_for(5, [&](std::int64_t inner) {
                    if (outer == 2 && inner == 3) throw 1;
                });
            });
        } catch (int) {
            caught = true;
        }
        CHECK(caught);
    }
}

TEST(the_thread_count_changes_while_others_run) {
    std::atomic<bool> stop{false};
    std::thread changer([&] {
        for (int count = 1; !stop; count = count % 7 + 1) set_threads(count);
    });
    on_callers(4, [](int) {
        for (int i = 0; i < 500; ++i) call(10);
    });
    stop = true;
    changer.join();
}

// All workers are in one call whose pieces do not end; another caller must finish its work without them, repeatedly.
TEST(workers_that_never_come_are_not_waited_for) {
    set_threads(3);
    std::mutex mutex;
    std::condition_variable changed;
    int inside = 0;
    bool released = false;
    std::thread holder([&] {
        parallel_for(3, [&](std::int64_t) {
            std::unique_lock<std::mutex> lock(mutex);
            ++inside;
            changed.notify_all();
            changed.wait(lock, [&] { return released; });
        });
    });
    {
        // At most the 3 threads of this call are in it: its caller and as many workers as there were before.
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return inside >= 1; });
    }
    const long before = resident_kib();
    for (int i = 0; i < 200'000; ++i) parallel_for(2, [](std::int64_t) {});
    for (int i = 0; i < 300; ++i) call(10);
    CHECK(resident_kib() - before < kAllowedKib);  // nor remembered
    {
        const std::lock_guard<std::mutex> lock(mutex);
        released = true;
    }
    changed.notify_all();
    holder.join();
}
