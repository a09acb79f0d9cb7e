// The native tests' few tools: a list of tests, and a check that ends the process where it fails, on any thread.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace fedcore::test {

struct Test {
    const char* name;
    void (*run)();
};

inline std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}

[[noreturn]] inline void fail(const char* file, int line, const char* what) {
    std::fprintf(stderr, "%s:%d: not so: %s\n", file, line, what);
    std::fflush(stderr);
    std::_Exit(1);
}

}  // namespace fedcore::test

#define TEST(name)                                                                                \
    static void name();                                                                           \
    static const bool name##_is_listed = (fedcore::test::tests().push_back({#name, name}), true); \
    static void name()

#define CHECK(condition)                                                       \
    do {                                                                       \
        if (!(condition)) fedcore::test::fail(__FILE__, __LINE__, #condition); \
    } while (false)
