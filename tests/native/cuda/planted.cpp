// Faults that the emulation must find, each in a process of its own, which must not come to its end quietly if it was
// compiled to find that kind: plainly, or for ASan and UBSan, or for TSan. Sound kernels must come to theirs.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "cuda_on_host.h"

namespace {

constexpr int kThreads = 64;

// A barrier is missing between a thread's store and its neighbour's load.
__global__ void shared_race(float* out) {
    __shared__ float values[kThreads];
    FEDCORE_BEGIN_SHARED(values);
    values[threadIdx.x] = static_cast<float>(threadIdx.x);
    out[threadIdx.x] = values[(threadIdx.x + 1) % kThreads];
}

// The same with the barrier: no sanitizer may complain.
__global__ void shared_sound(float* out) {
    __shared__ float values[kThreads];
    FEDCORE_BEGIN_SHARED(values);
    values[threadIdx.x] = static_cast<float>(threadIdx.x);
    __syncthreads();
    out[blockIdx.x * kThreads + threadIdx.x] = values[(threadIdx.x + 1) % kThreads];
}

// A barrier stands before the loop's body alone: the next round's stores meet the last one's loads.
__global__ void loop_race(float* out) {
    __shared__ float values[kThreads];
    FEDCORE_BEGIN_SHARED(values);
    float sum = 0;
    for (int round = 0; round < 3; ++round) {
        values[threadIdx.x] = static_cast<float>(round);
        __syncthreads();
        sum += values[kThreads - 1 - threadIdx.x];
    }
    out[threadIdx.x] = sum;
}

// Two blocks write one element.
__global__ void block_race(float* out) {
    out[threadIdx.x] = static_cast<float>(blockIdx.x);
}

// A shuffle makes no order between accesses to memory; __syncwarp does.
__global__ void shuffle_race(float* out) {
    __shared__ float values[32];
    FEDCORE_BEGIN_SHARED(values);
    if (threadIdx.x >= 32) return;
    values[threadIdx.x] = 1;
    const float one = __shfl_xor_sync(0xffffffffu, values[threadIdx.x], 1);
    out[threadIdx.x] = one + values[threadIdx.x ^ 1];
}

__global__ void warp_sound(float* out) {
    __shared__ float values[32];
    FEDCORE_BEGIN_SHARED(values);
    if (threadIdx.x >= 32) return;
    values[threadIdx.x] = 1;
    __syncwarp();
    out[threadIdx.x] = values[threadIdx.x ^ 1];
}

__global__ void shared_bounds(float* out) {
    __shared__ float values[kThreads];
    FEDCORE_BEGIN_SHARED(values);
    values[threadIdx.x + 1] = 1;
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x];
}

__global__ void global_bounds(float* out) {
    out[kThreads + threadIdx.x + 1] = 1;
}

__global__ void dynamic_bounds(float* out) {
    auto* const values = static_cast<float*>(cuda_on_host::dynamic_shared());
    values[threadIdx.x + 1] = 1;
    out[threadIdx.x] = 1;
}

__global__ void dynamic_sound(float* out) {
    auto* const values = static_cast<float*>(cuda_on_host::dynamic_shared());
    values[threadIdx.x] = 1;
    __syncthreads();
    out[blockIdx.x * kThreads + threadIdx.x] = values[(threadIdx.x + 1) % kThreads];
}

__global__ void misaligned(float* out) {
    *reinterpret_cast<float4*>(out + 1) = make_float4(1, 2, 3, 4);
}

// Some lanes of a warp wait at a barrier, the others for those lanes.
__global__ void divergent_barrier(float* out) {
    float value = 1;
    if (threadIdx.x < 40)
        __syncthreads();
    else
        value = __shfl_sync(0xffffffffu, value, 0);
    out[threadIdx.x] = value;
}

__global__ void missing_lane(float* out) {
    if (threadIdx.x % 32 == 5) return;
    out[threadIdx.x] = __shfl_down_sync(0xffffffffu, 1.0f, 1);
}

__global__ void unset_shared(float* out) {
    __shared__ float values[kThreads];
    FEDCORE_BEGIN_SHARED(values);
    if (threadIdx.x > 0) values[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x];
}

enum Finder { nobody, plain, address, thread };
#if defined(__SANITIZE_ADDRESS__)
constexpr Finder kSelf = address;
#elif defined(__SANITIZE_THREAD__)
constexpr Finder kSelf = thread;
#else
constexpr Finder kSelf = plain;
#endif

struct Fault {
    const char* name;
    Finder found_by;
    void (*kernel)(float*);
    unsigned blocks;
};

constexpr Fault kFaults[] = {
    {"shared_sound", nobody, shared_sound, 2},    {"warp_sound", nobody, warp_sound, 1},
    {"dynamic_sound", nobody, dynamic_sound, 2},  {"shared_race", thread, shared_race, 1},
    {"loop_race", thread, loop_race, 1},          {"block_race", thread, block_race, 2},
    {"shuffle_race", thread, shuffle_race, 1},    {"shared_bounds", address, shared_bounds, 1},
    {"global_bounds", address, global_bounds, 1}, {"dynamic_bounds", address, dynamic_bounds, 1},
    {"misaligned", address, misaligned, 1},       {"divergent_barrier", plain, divergent_barrier, 1},
    {"missing_lane", plain, missing_lane, 1},     {"unset_shared", plain, unset_shared, 1},
};

int run(const Fault& fault) {
    auto* const out = static_cast<float*>(std::malloc(2 * kThreads * sizeof(float)));
    cuda_on_host::launch({dim3(fault.blocks), dim3(kThreads), kThreads * sizeof(float)}, 0, fault.kernel, out);
    bool numbers = true;
    for (int i = 0; i < 32; ++i) numbers = numbers && out[i] == out[i];
    std::free(out);
    return numbers ? 0 : 3;  // shared memory begins as NaN
}

}  // namespace

int main() {
    int wrong = 0;
    for (const Fault& fault : kFaults) {
        if (fault.found_by != nobody && fault.found_by != kSelf) continue;
        std::printf("%s\n", fault.name);
        std::fflush(stdout);
        const pid_t child = fork();
        if (child == 0) std::exit(run(fault));
        int status = -1;
        waitpid(child, &status, 0);
        if ((status == 0) == (fault.found_by == nobody)) continue;
        std::printf("%s: %s\n", fault.name, status == 0 ? "not found" : "found where nothing is");
        wrong = 1;
    }
    return wrong;
}
