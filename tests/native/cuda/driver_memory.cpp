// The driver for tests: accesses to a device's memory, its contents and its size.
#include <cmath>
#include <cstring>

#include "driver_tests.h"

using namespace fedcore::test;

DRIVER_TEST(memory_begins_as_nan_and_is_copied) {
    const Address at = cuda.memory(3 * sizeof(float));
    CHECK(at % 256 == 0);
    for (const float value : cuda.read(at, 3)) CHECK(std::isnan(value));
    const float values[3] = {1, 2, 3};
    CHECK(cuda.cuMemcpyHtoDAsync(at, values, sizeof values, nullptr) == 0);
    CHECK(cuda.read(at, 3) == (std::vector<float>{1, 2, 3}));
    const Address other = cuda.memory(sizeof values);
    CHECK(cuda.cuMemcpyDtoDAsync(other, at, sizeof values, nullptr) == 0);
    CHECK(cuda.read(other, 3) == (std::vector<float>{1, 2, 3}));
    CHECK(cuda.cuMemsetD8Async(other, 0, 2 * sizeof(float), nullptr) == 0);
    CHECK(cuda.read(other, 3) == (std::vector<float>{0, 0, 3}));
}

DRIVER_TEST(the_host_may_not_touch_it) {
    const auto* const at = reinterpret_cast<volatile char*>(cuda.memory(4096));
    CHECK(dies([&] { (void)*at; }));
    CHECK(dies([&] { (void)at[4096]; }));
}

DRIVER_TEST(copies_stay_within_an_allocation) {
    const Address at = cuda.memory(100);
    char host[200] = {};
    CHECK(cuda.cuMemcpyHtoDAsync(at, host, 101, nullptr) == fake_cuda::kInvalidValue);
    CHECK(cuda.cuMemcpyDtoHAsync(host, at + 1, 100, nullptr) == fake_cuda::kInvalidValue);
    CHECK(cuda.cuMemcpyHtoDAsync(at + 1, host, 99, nullptr) == 0);
    CHECK(cuda.cuMemcpyDtoDAsync(at, at - 1, 1, nullptr) == fake_cuda::kInvalidValue);
    CHECK(cuda.cuMemcpyHtoDAsync(at, reinterpret_cast<const void*>(at), 1, nullptr) == fake_cuda::kInvalidValue);
}

DRIVER_TEST(what_was_freed_is_gone) {
    const Address at = cuda.memory(100);
    CHECK(cuda.cuMemFree(at) == 0);
    CHECK(cuda.cuMemFree(at) == fake_cuda::kInvalidValue);
    CHECK(cuda.cuMemFree(0) == 0);
    CHECK(cuda.memory(100) != at);
    char byte = 0;
    CHECK(cuda.cuMemcpyDtoHAsync(&byte, at, 1, nullptr) == fake_cuda::kInvalidValue);
    auto* const pinned = cuda.pinned<char>(10);
    pinned[9] = 1;
    CHECK(cuda.cuMemFreeHost(pinned) == 0);
    CHECK(cuda.cuMemFreeHost(pinned) == fake_cuda::kInvalidValue);
    CHECK(dies([&] { *const_cast<volatile char*>(pinned) = 1; }));
}

DRIVER_TEST(memory_has_an_end) {
    fake_cuda_set_memory(1000);
    const Address at = cuda.memory(600);
    CHECK(fake_cuda_live_bytes(-1) == 600 && fake_cuda_live_bytes(0) == 600 && fake_cuda_live_bytes(1) == 0);
    Address other = 0;
    CHECK(cuda.cuMemAlloc(&other, 401) == fake_cuda::kOutOfMemory);
    CHECK(cuda.cuMemAlloc(&other, 0) == fake_cuda::kInvalidValue);
    CHECK(cuda.cuMemFree(at) == 0);
    CHECK(cuda.cuMemAlloc(&other, 1000) == 0);
    std::size_t total = 0;
    CHECK(cuda.cuDeviceTotalMem(&total, 0) == 0 && total == 1000);
}

DRIVER_TEST(devices_have_memory_of_their_own) {
    const Address at = cuda.memory(100);
    CHECK(cuda.cuCtxPushCurrent(cuda.contexts[1]) == 0);
    char host[100] = {};
    CHECK(cuda.cuMemcpyHtoDAsync(at, host, 100, nullptr) == fake_cuda::kInvalidValue);
    CHECK(cuda.cuMemFree(at) == fake_cuda::kInvalidValue);
    int ordinal = -1;
    CHECK(cuda.cuPointerGetAttribute(&ordinal, 9, at + 99) == 0 && ordinal == 0);
    CHECK(cuda.cuPointerGetAttribute(&ordinal, 9, cuda.memory(1)) == 0 && ordinal == 1);
    CHECK(cuda.cuPointerGetAttribute(&ordinal, 9, at + 100) == fake_cuda::kInvalidValue);
    Handle popped = nullptr;
    CHECK(cuda.cuCtxPopCurrent(&popped) == 0 && popped == cuda.contexts[1]);
    CHECK(cuda.cuMemcpyHtoDAsync(at, host, 100, nullptr) == 0);
}
