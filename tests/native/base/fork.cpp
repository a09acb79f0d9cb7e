// The pool in children of fork, which have none of their parent's threads.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "base/pool.h"
#include "check.h"

using namespace fedcore;

namespace {

bool works() {
    std::atomic<std::int64_t> sum{0};
    parallel_for(100, [&](std::int64_t piece) { sum += piece; });
    return sum == 4950;
}

// Whether body() holds in a child, which must end by itself within a minute.
template <class Body>
bool in_child(const Body& body) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(60);
        _exit(body() ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

TEST(a_child_forked_before_any_use) {
    set_threads(3);
    CHECK(in_child([] { return works(); }));
}

TEST(many_first_callers_make_one_pool) {
    set_threads(3);
    for (int i = 0; i < 10; ++i)
        CHECK(in_child([] {
            std::atomic<int> good{0};
            std::vector<std::thread> callers;
            for (int caller = 0; caller < 6; ++caller) callers.emplace_back([&] { good += works(); });
            for (std::thread& caller : callers) caller.join();
            return good == 6;
        }));
}

TEST(children_of_children) {
    for (const int count : {1, 2, 3, 7}) {
        set_threads(count);
        CHECK(works());
        CHECK(in_child([] { return works() && in_child([] { return works(); }) && works(); }));
        CHECK(works());
    }
}

TEST(children_forked_while_others_are_in_the_pool) {
    set_threads(3);
    std::atomic<bool> stop{false};
    std::vector<std::thread> busy;
    for (int i = 0; i < 2; ++i)
        busy.emplace_back([&] {
            while (!stop) CHECK(works());
        });
    for (int i = 0; i < 20; ++i) CHECK(in_child([] { return works(); }));
    stop = true;
    for (std::thread& thread : busy) thread.join();
}
