// What the tests of the driver share: its functions, found as the package finds them, and processes of their own.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "driver/control.h"
#include "driver/functions.h"

extern "C" int cuGetProcAddress_v2(const char* name, void** function, int version, std::uint64_t flags, int* status);

namespace fedcore::test {

using fake_cuda::Address;
using fake_cuda::Handle;

struct Cuda {
#define FEDCORE_LOOK_UP(name, version, parameters) int(*name) parameters = nullptr;
    FAKE_CUDA_FUNCTIONS(FEDCORE_LOOK_UP)
#undef FEDCORE_LOOK_UP
    Handle contexts[2] = {};

    // Started with two devices, the first one's context current.
    Cuda() {
#define FEDCORE_LOOK_UP(name, version, parameters)                           \
    {                                                                        \
        void* found = nullptr;                                               \
        CHECK(cuGetProcAddress_v2(#name, &found, version, 0, nullptr) == 0); \
        name = reinterpret_cast<decltype(name)>(found);                      \
    }
        FAKE_CUDA_FUNCTIONS(FEDCORE_LOOK_UP)
#undef FEDCORE_LOOK_UP
        setenv("FAKE_CUDA_DEVICES", "2", 1);
        CHECK(cuInit(0) == 0);
        for (int device = 0; device < 2; ++device) CHECK(cuDevicePrimaryCtxRetain(&contexts[device], device) == 0);
        CHECK(cuCtxPushCurrent(contexts[0]) == 0);
    }

    Address memory(std::size_t bytes) const {
        Address at = 0;
        CHECK(cuMemAlloc(&at, bytes) == 0);
        return at;
    }
    // At a multiple of 16 bytes, so that nothing is beside it.
    template <class T>
    T* pinned(std::size_t count) const {
        void* at = nullptr;
        CHECK(cuMemHostAlloc(&at, count * sizeof(T), 0) == 0);
        return static_cast<T*>(at);
    }
    Handle stream(unsigned flags = 1) const {
        Handle made = nullptr;
        CHECK(cuStreamCreate(&made, flags) == 0);
        return made;
    }
    Handle event() const {
        Handle made = nullptr;
        CHECK(cuEventCreate(&made, 2) == 0);
        return made;
    }
    Handle function(const char* name) const {
        const unsigned image = 0xba55ed50;
        Handle module = nullptr, found = nullptr;
        CHECK(cuModuleLoadData(&module, &image) == 0);
        CHECK(cuModuleGetFunction(&found, module, name) == 0);
        return found;
    }
    std::vector<float> read(Address from, std::size_t count) const {
        std::vector<float> to(count);
        CHECK(cuMemcpyDtoHAsync(to.data(), from, count * sizeof(float), nullptr) == 0);
        return to;
    }
};

template <class Body>
int status_of(const Body& body) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(120);
        body();
        _exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    return status;
}

// Whether a process that does this is stopped by a signal, or by the sanitizer that it was compiled for.
template <class Body>
bool dies(const Body& body) {
    const int status = status_of([&] {
        CHECK(std::freopen("/dev/null", "w", stderr) != nullptr);
        body();
    });
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return status != 0;
#else
    return WIFSIGNALED(status);
#endif
}

}  // namespace fedcore::test

// A test in a process of its own, which alone starts the driver.
#define DRIVER_TEST(name)                                                                  \
    static void name##_alone(const fedcore::test::Cuda& cuda);                             \
    TEST(name) {                                                                           \
        CHECK(fedcore::test::status_of([] { name##_alone(fedcore::test::Cuda()); }) == 0); \
    }                                                                                      \
    static void name##_alone([[maybe_unused]] const fedcore::test::Cuda& cuda)
