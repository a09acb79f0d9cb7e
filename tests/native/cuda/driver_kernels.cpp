// The driver for tests: launches, and failures that are asked for.
#include <cstring>

#include "driver_tests.h"
#include "kernels/cuda/calls.h"
#include "kernels/direction.h"

using namespace fedcore;
using namespace fedcore::test;

namespace {

constexpr std::int64_t kCount = 100;

struct Stepped {
    explicit Stepped(const Cuda& made) : cuda(made), step(made.function("fedcore_direction_step")) {
        for (std::int64_t j = 0; j < kCount; ++j) host.push_back(static_cast<float>(j));
        for (const Address at : {y, grad}) CHECK(cuda.cuMemcpyHtoDAsync(at, host.data(), bytes, nullptr) == 0);
    }
    int launch(unsigned blocks, std::int64_t n = kCount, unsigned shared = 0, unsigned threads = cuda::kThreads) {
        return launch(blocks, {local(grad), reinterpret_cast<float*>(y), n, 0}, shared, threads);
    }
    int launch(unsigned blocks, cuda::DirectionCall call, unsigned shared = 0, unsigned threads = cuda::kThreads) {
        void* arguments[] = {&call};
        const int code = cuda.cuLaunchKernel(step, blocks, 1, 1, threads, 1, 1, shared, nullptr, arguments, nullptr);
        call = {};  // it was read
        return code;
    }
    static LocalStep local(Address of) {
        return {reinterpret_cast<const float*>(of), nullptr, nullptr, nullptr, 1, 0, 0, 0, 0.5f};
    }

    const std::size_t bytes = kCount * sizeof(float);
    const Cuda& cuda;
    Handle step;
    Address y = cuda.memory(bytes), grad = cuda.memory(bytes);
    std::vector<float> host;
};

std::vector<std::string> calls() {
    std::vector<std::string> lines(1);
    for (const char* at = fake_cuda_calls(); *at != '\0'; ++at) {
        if (*at == '\n')
            lines.emplace_back();
        else
            lines.back() += *at;
    }
    lines.pop_back();
    return lines;
}

}  // namespace

DRIVER_TEST(a_kernel_runs_when_it_is_waited_for) {
    Stepped one(cuda);
    CHECK(one.launch(1) == 0);
    auto due = one.host;
    LocalStep step = Stepped::local(0);
    step.grad = one.host.data();
    direction_step(step, due.data(), kCount);
    CHECK(cuda.read(one.y, kCount) == due);
}

DRIVER_TEST(launches_are_checked) {
    Stepped one(cuda);
    CHECK(one.launch(0) == fake_cuda::kInvalidValue);
    CHECK(one.launch(1u << 31) == fake_cuda::kInvalidValue);
    CHECK(one.launch(1, kCount, 0, 1025) == fake_cuda::kInvalidValue);
    CHECK(one.launch(1, kCount, (48 << 10) + 1) == fake_cuda::kInvalidValue);
    CHECK(cuda.cuFuncSetAttribute(one.step, 8, 64 << 10) == 0);
    CHECK(one.launch(1, kCount, (48 << 10) + 1) == 0);
    CHECK(cuda.cuFuncSetAttribute(one.step, 8, 228 << 10) == fake_cuda::kInvalidValue);
    CHECK(cuda.cuFuncSetAttribute(nullptr, 8, 1) == fake_cuda::kInvalidHandle);
    CHECK(cuda.cuCtxPushCurrent(cuda.contexts[1]) == 0);
    CHECK(one.launch(1) == fake_cuda::kInvalidHandle);
}

TEST(a_kernel_that_writes_one_element_too_many) {
    CHECK(dies([] {
        const Cuda cuda;
        Stepped one(cuda);
        CHECK(one.launch(1, kCount + 1) == 0);
        cuda.cuStreamSynchronize(nullptr);
    }));
}

TEST(a_kernel_that_reads_another_devices_memory) {
    CHECK(dies([] {
        const Cuda cuda;
        Stepped one(cuda);
        CHECK(cuda.cuCtxPushCurrent(cuda.contexts[1]) == 0);
        const LocalStep step = Stepped::local(cuda.memory(one.bytes));
        CHECK(cuda.cuCtxPopCurrent(nullptr) == 0);
        CHECK(one.launch(1, {step, reinterpret_cast<float*>(one.y), kCount, 0}) == 0);
        cuda.cuStreamSynchronize(nullptr);
    }));
}

DRIVER_TEST(images_and_kernels_are_looked_up) {
    Handle module = nullptr, function = nullptr;
    const unsigned image = 0xba55ed50, other = 1;
    CHECK(cuda.cuModuleLoadData(&module, &other) == fake_cuda::kInvalidImage);
    CHECK(cuda.cuModuleLoadData(&module, nullptr) == fake_cuda::kInvalidImage);
    CHECK(cuda.cuModuleLoadData(&module, &image) == 0);
    CHECK(cuda.cuModuleGetFunction(&function, module, "fedcore_none") == fake_cuda::kNotFound);
    CHECK(cuda.cuModuleGetFunction(&function, nullptr, "fedcore_mix") == fake_cuda::kInvalidHandle);
    setenv("FAKE_CUDA_ANY_IMAGE", "1", 1);
    CHECK(cuda.cuModuleLoadData(&module, nullptr) == 0);
}

DRIVER_TEST(functions_are_found_by_the_version_of_their_form) {
    void* found = nullptr;
    int status = -1;
    CHECK(cuGetProcAddress_v2("cuMemAlloc", &found, 2000, 0, &status) == fake_cuda::kNotFound);
    CHECK(status == 2 && found == nullptr);
    CHECK(cuGetProcAddress_v2("cuMemAlloc", &found, 12000, 0, &status) == 0);
    CHECK(status == 0 && found != nullptr);
    CHECK(cuGetProcAddress_v2("cuMemAlloc_v2", &found, 12000, 0, &status) == fake_cuda::kNotFound);
    CHECK(status == 1);
}

DRIVER_TEST(calls_need_a_context_and_a_start) {
    CHECK(cuda.cuCtxPopCurrent(nullptr) == 0);
    Address at = 0;
    CHECK(cuda.cuMemAlloc(&at, 1) == fake_cuda::kInvalidContext);
    CHECK(cuda.cuCtxPopCurrent(nullptr) == fake_cuda::kInvalidContext);
    CHECK(cuda.cuCtxPushCurrent(&at) == fake_cuda::kInvalidContext);
    // A child of fork has nothing of it.
    CHECK(status_of([&] { CHECK(cuda.cuInit(0) == fake_cuda::kNotInitialised); }) == 0);
    CHECK(status_of([&] { CHECK(cuda.cuCtxPushCurrent(cuda.contexts[0]) == fake_cuda::kNotInitialised); }) == 0);
}

DRIVER_TEST(calls_fail_on_demand) {
    Address at = 0;
    fake_cuda_fail("cuMemAlloc", fake_cuda::kOutOfMemory, 1);
    CHECK(cuda.cuMemAlloc(&at, 1) == 0);
    CHECK(cuda.cuMemAlloc(&at, 1) == fake_cuda::kOutOfMemory);
    CHECK(cuda.cuMemAlloc(&at, 1) == 0);
}

DRIVER_TEST(a_failed_kernel_is_the_end_of_its_context) {
    Stepped one(cuda);
    fake_cuda_fail("kernel", fake_cuda::kIllegalAddress, 0);
    CHECK(one.launch(1) == 0);  // no call waits yet
    CHECK(cuda.cuStreamSynchronize(nullptr) == fake_cuda::kIllegalAddress);
    Address at = 0;
    CHECK(cuda.cuMemAlloc(&at, 1) == fake_cuda::kIllegalAddress);
    CHECK(cuda.cuCtxPushCurrent(cuda.contexts[1]) == 0);
    CHECK(cuda.cuMemAlloc(&at, 1) == 0);
    CHECK(cuda.cuCtxPopCurrent(nullptr) == 0);
    fake_cuda_mend();
    CHECK(cuda.cuMemAlloc(&at, 1) == 0);
}

DRIVER_TEST(calls_are_recorded) {
    Stepped one(cuda);
    calls();
    CHECK(one.launch(1) == 0);
    CHECK(cuda.cuStreamSynchronize(nullptr) == 0);
    CHECK((calls() == std::vector<std::string>{"cuLaunchKernel fedcore_direction_step grid=1x1x1 stream=0",
                                               "cuStreamSynchronize stream=0"}));
    CHECK(calls().empty());
}
