// Compiles CUDA kernels as plain C++ and runs them on the CPU, so that the very same source is tested where there is no
// GPU: include it first, and call cuda_on_host::launch. Threads of a block are fibers that take turns at barriers and
// shuffles; blocks run one after another. It knows what these kernels use of CUDA, and no more.
//
// What it finds: wrong results; barriers and shuffles that not every thread reaches (with the place of each); under
// AddressSanitizer accesses outside of any memory, shared arrays included; under ThreadSanitizer races, because its
// fibers count as threads between which barriers alone make an order. What it cannot find: what threads
// of a warp do wrongly together, weak memory order, bank conflicts, time, and the limits of a device's launches.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_of = 1, unsigned y_of = 1, unsigned z_of = 1) : x(x_of), y(y_of), z(z_of) {}
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) double2 {
    double x, y;
};
struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) {
    return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
// One block at a time has it. A section of its own, for the sanitizers; not within templates, where GCC ignores it.
#define __shared__ [[gnu::section("cuda_shared"), gnu::aligned(16)]] static

namespace cuda_on_host {

extern dim3 thread, block, block_size, grid_size;  // of the fiber that runs

// ---- Where threads meet ----

enum class Meeting { barrier, warp, shuffle, vote };

// Waits for the others; `value` goes to the lanes that name this lane as their `source`. vote: the lanes whose value is
// not 0; barrier: whether any value is not.
std::uint64_t meet(Meeting meeting, unsigned mask, std::uint64_t value, unsigned source, const void* place);

void* dynamic_shared();

// A kernel says so of all its __shared__ memory before it touches it: each block begins with what none may rely on.
void begin_shared(void* memory, std::size_t bytes);

// ---- Launching ----

struct Launch {
    dim3 grid, block;
    std::size_t shared_bytes = 0;
};

// Runs kernel(call) for every thread of every block. Not again before it is done; callers take turns. order: in which
// order the threads of a block go on from a meeting: 0 ascending, else shuffled by this seed.
void run(const Launch& launch, void (*kernel)(void*), void* call, std::uint64_t order);

// kernel(arguments...)
template <class... Parameters>
void launch(const Launch& how, std::uint64_t order, void (*kernel)(Parameters...),
            const std::remove_reference_t<Parameters>&... arguments) {
    auto call = [&] { kernel(arguments...); };
    run(how, [](void* bound) { (*static_cast<decltype(call)*>(bound))(); }, &call, order);
}

template <class T>
T shuffled(unsigned mask, T value, unsigned source, const void* place) {
    static_assert(sizeof(T) <= 8, "a register pair at most");
    std::uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    bits = meet(Meeting::shuffle, mask, bits, source, place);
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline unsigned lane() {
    return (thread.x + block_size.x * (thread.y + block_size.y * thread.z)) % 32;
}

}  // namespace cuda_on_host

#define threadIdx (cuda_on_host::thread)
#define blockIdx (cuda_on_host::block)
#define blockDim (cuda_on_host::block_size)
#define gridDim (cuda_on_host::grid_size)
#define FEDCORE_DYNAMIC_SHARED(Element) static_cast<Element*>(cuda_on_host::dynamic_shared())
#define FEDCORE_BEGIN_SHARED(memory) cuda_on_host::begin_shared(&(memory), sizeof(memory))
#define FEDCORE_HERE __builtin_return_address(0)

[[gnu::noinline]] inline void __syncthreads() {
    cuda_on_host::meet(cuda_on_host::Meeting::barrier, 0, 0, 0, FEDCORE_HERE);
}
[[gnu::noinline]] inline int __syncthreads_or(int condition) {
    return cuda_on_host::meet(cuda_on_host::Meeting::barrier, 0, condition != 0, 0, FEDCORE_HERE) != 0;
}
[[gnu::noinline]] inline void __syncwarp(unsigned mask = 0xffffffffu) {
    cuda_on_host::meet(cuda_on_host::Meeting::warp, mask, 0, 0, FEDCORE_HERE);
}
[[gnu::noinline]] inline unsigned __ballot_sync(unsigned mask, int condition) {
    const auto place = FEDCORE_HERE;
    return static_cast<unsigned>(cuda_on_host::meet(cuda_on_host::Meeting::vote, mask, condition != 0, 0, place));
}
template <class T>
[[gnu::noinline]] T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const unsigned start = cuda_on_host::lane() & ~(static_cast<unsigned>(width) - 1);
    return cuda_on_host::shuffled(mask, value, start + static_cast<unsigned>(source) % width, FEDCORE_HERE);
}
template <class T>
[[gnu::noinline]] T __shfl_down_sync(unsigned mask, T value, unsigned down, int width = 32) {
    const unsigned lane = cuda_on_host::lane(), last = lane | (static_cast<unsigned>(width) - 1);
    return cuda_on_host::shuffled(mask, value, lane + down > last ? lane : lane + down, FEDCORE_HERE);
}
template <class T>
[[gnu::noinline]] T __shfl_xor_sync(unsigned mask, T value, int other, int width = 32) {
    const unsigned lane = cuda_on_host::lane(), there = lane ^ static_cast<unsigned>(other);
    return cuda_on_host::shuffled(mask, value, there / width == lane / width ? there : lane, FEDCORE_HERE);
}

inline unsigned atomicOr(unsigned* at, unsigned bits) {
    return __atomic_fetch_or(at, bits, __ATOMIC_RELAXED);
}
inline unsigned long long atomicMax(unsigned long long* at, unsigned long long value) {
    unsigned long long before = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (before < value &&
           !__atomic_compare_exchange_n(at, &before, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return before;
}
template <class T>
T __ldcs(const T* at) {
    return *at;
}
template <class T>
T __ldca(const T* at) {
    return *at;
}
template <class T>
void __stcs(T* at, const T& value) {
    *at = value;
}
template <class T>
void __stwb(T* at, const T& value) {
    *at = value;
}

inline std::uint32_t __float_as_uint(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
inline float __uint_as_float(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline int __clz(int value) {
    return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value));
}
template <class T>
constexpr T min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
constexpr T max(T a, T b) {
    return a < b ? b : a;
}
using std::fabs;
