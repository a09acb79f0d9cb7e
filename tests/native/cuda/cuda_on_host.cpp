// The fibers. Compiled without ThreadSanitizer, which would take the scheduler's own data for shared between threads.
#include "cuda_on_host.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "fiber_context.h"

#if defined(FEDCORE_TSAN)
#    include <sanitizer/tsan_interface.h>
// Of its interface for virtual machines: what was known of accesses to a range is forgotten, as behind malloc.
extern "C" void __tsan_java_init(unsigned long begin, unsigned long size);
extern "C" void __tsan_java_alloc(unsigned long begin, unsigned long size);
extern "C" void __tsan_java_free(unsigned long begin, unsigned long size);
#endif
#if defined(__SANITIZE_ADDRESS__)
#    include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SSE2__)
#    include <xmmintrin.h>
#endif

// Around everything that is __shared__; null where a program has none.
extern "C" {
extern char __start_cuda_shared[] __attribute__((weak));
extern char __stop_cuda_shared[] __attribute__((weak));
}

namespace cuda_on_host {

dim3 thread, block, block_size, grid_size;

namespace {

constexpr std::size_t kMost = 1024;
constexpr std::size_t kStack = (256 << 10) + 33 * 64;  // no power of two, or their tops would share lines of the cache
// Blocks of a launch have fibers of so many sets in turn. To ThreadSanitizer two blocks know nothing of each other
// unless they have the same set; to make new fibers for each block would cost it half a millisecond a fiber.
#if defined(FEDCORE_TSAN)
constexpr std::size_t kSets = 3;
#else
constexpr std::size_t kSets = 1;
#endif

enum class State { ready, waiting, done };

struct Fiber {
    dim3 thread;
    State state;
    Meeting meeting;
    unsigned mask, source;
    std::uint64_t value;
    const void* place;
};

Fiber fibers[kMost];
Context contexts[kMost];
bool begun[kMost];
char* stacks = nullptr;
void* tsan_of[kSets][kMost];
std::size_t set = 0;
Context scheduler;
std::size_t count = 0, running = 0;
void (*body)(void*) = nullptr;
void* bound = nullptr;
char* dynamic = nullptr;
bool shared_is_new = false;   // the block's: no thread has begun it yet
std::vector<char*> dynamics;  // of a launch: given back when its threads are known to be done
std::uint64_t shuffle_state = 0;

// ---- Annotations for the sanitizers ----

// What threads have done before a meeting is seen by all behind it. Every meeting has an address of its own, which
// stands for it: an older one would carry what threads of other blocks did, or what fast threads do behind it.
constexpr std::size_t kMeetings = 1 << 20;
std::uint64_t addresses[kMeetings];
std::size_t used = 0;
char *of_block, *of_warp[kMost / 32], *of_start;
char of_end;

char* new_meeting() {
    return reinterpret_cast<char*>(&addresses[used++ % kMeetings]);
}

#if defined(FEDCORE_TSAN)
void* scheduler_tsan = nullptr;
void release(char* order) {
    __tsan_release(order);
}
void acquire(char* order) {
    __tsan_acquire(order);
}
void* new_tsan() {
    return __tsan_create_fiber(0);
}
void before_switch(void* to) {
    __tsan_switch_to_fiber(to, __tsan_switch_to_fiber_no_sync);
}
void* own_tsan() {
    return scheduler_tsan = __tsan_get_current_fiber();
}
void forget(char* begin, std::size_t size) {
    static bool first = true;
    const auto all = reinterpret_cast<unsigned long>(__start_cuda_shared);
    if (first) __tsan_java_init(all, (reinterpret_cast<unsigned long>(__stop_cuda_shared) - all + 7) / 8 * 8);
    first = false;
    __tsan_java_alloc(reinterpret_cast<unsigned long>(begin), size);
    __tsan_java_free(reinterpret_cast<unsigned long>(begin), size);
}
#else
void* scheduler_tsan = nullptr;
void release(char*) {}
void acquire(char*) {}
void* new_tsan() {
    return nullptr;
}
void before_switch(void*) {}
void* own_tsan() {
    return nullptr;
}
void forget(char*, std::size_t) {}
#endif

#if defined(__SANITIZE_ADDRESS__)
const void* scheduler_stack = nullptr;
std::size_t scheduler_size = 0;
void leave(void** fake, const void* stack, std::size_t size) {
    __sanitizer_start_switch_fiber(fake, stack, size);
}
void arrive(void* fake, const void** from, std::size_t* size) {
    __sanitizer_finish_switch_fiber(fake, from, size);
}
#else
const void* scheduler_stack = nullptr;
std::size_t scheduler_size = 0;
void leave(void**, const void*, std::size_t) {}
void arrive(void*, const void**, std::size_t*) {}
#endif

void spoil(void* memory, std::size_t bytes) {
#if defined(FEDCORE_TSAN)  // which knows of memset
    for (std::size_t i = 0; i < bytes; ++i) static_cast<volatile unsigned char*>(memory)[i] = 0xff;
#else
    std::memset(memory, 0xff, bytes);
#endif
}

char* stack_of(std::size_t fiber) {
    return stacks + (set * kMost + fiber) * kStack;
}

// ---- Switching ----

void resume(std::size_t number) {
    Fiber& fiber = fibers[number];
    running = number;
    thread = fiber.thread;
    void* fake = nullptr;
    before_switch(tsan_of[set][number]);
    leave(&fake, stack_of(number), kStack);
    change(scheduler, contexts[number]);
    arrive(fake, nullptr, nullptr);
}

void give_turn(bool last) {
    void* fake = nullptr;
    before_switch(scheduler_tsan);
    leave(last ? nullptr : &fake, scheduler_stack, scheduler_size);
    change(contexts[running], scheduler);
    arrive(fake, nullptr, nullptr);
}

void entry() {
    do {
        arrive(nullptr, &scheduler_stack, &scheduler_size);
        acquire(of_start);
        body(bound);
        release(&of_end);
        fibers[running].state = State::done;
        give_turn(!kKept);
    } while (kKept);
    std::abort();
}

// ---- Meetings ----

const char* name_of(Meeting meeting) {
    constexpr const char* kNames[] = {"__syncthreads", "__syncwarp", "a shuffle", "a ballot"};
    return kNames[static_cast<int>(meeting)];
}

[[noreturn]] void stuck(const char* why) {
    std::fprintf(stderr, "cuda_on_host: block (%u, %u, %u): %s\n", block.x, block.y, block.z, why);
    for (std::size_t i = 0, first = 0; i <= count; ++i) {
        const Fiber &one = fibers[first], &other = fibers[i];
        if (i < count && other.state == one.state && (one.state != State::waiting || other.place == one.place))
            continue;
        std::fprintf(stderr, "    threads %zu..%zu: ", first, i - 1);
        if (one.state == State::waiting)
            std::fprintf(stderr, "wait at %s (mask %08x), called at %p\n", name_of(one.meeting), one.mask, one.place);
        else
            std::fprintf(stderr, one.state == State::done ? "have returned\n" : "run\n");
        first = i;
    }
    std::abort();
}

bool block_is_there() {
    for (std::size_t i = 0; i < count; ++i)
        if (fibers[i].state == State::ready ||
            (fibers[i].state == State::waiting && fibers[i].meeting != Meeting::barrier))
            return false;
    return true;
}

// Lets a warp's lanes of this mask go on if all are there.
bool settle_lanes(std::size_t first, const Fiber& one) {
    std::uint64_t votes = 0;
    for (unsigned l = 0; l < 32; ++l) {
        if ((one.mask >> l & 1) == 0) continue;
        if (first + l >= count || fibers[first + l].state == State::done)
            stuck("a mask names a lane that has returned, or that there is not");
        const Fiber& other = fibers[first + l];
        if (other.state != State::waiting || other.meeting != one.meeting || other.mask != one.mask) return false;
        votes |= (other.value & 1) << l;
    }
    const unsigned mask = one.mask;
    const Meeting meeting = one.meeting;
    std::uint64_t given[32];
    for (unsigned l = 0; l < 32; ++l) given[l] = first + l < count ? fibers[first + l].value : 0;
    for (unsigned l = 0; l < 32; ++l) {
        if ((mask >> l & 1) == 0) continue;
        Fiber& fiber = fibers[first + l];
        if (meeting == Meeting::shuffle) {
            if ((mask >> fiber.source & 1) == 0) stuck("a shuffle reads a lane that its mask does not name");
            fiber.value = given[fiber.source];
        } else {
            fiber.value = votes;
        }
        fiber.state = State::ready;
    }
    if (meeting == Meeting::warp) of_warp[first / 32] = new_meeting();
    return true;
}

bool settle() {
    bool any = false;
    for (std::size_t first = 0; first < count; first += 32)
        for (std::size_t i = first; i < first + 32 && i < count; ++i)
            if (fibers[i].state == State::waiting && fibers[i].meeting != Meeting::barrier)
                any = settle_lanes(first, fibers[i]) || any;
    if (any || !block_is_there()) return any;
    std::uint64_t votes = 0;
    for (std::size_t i = 0; i < count; ++i)
        if (fibers[i].state == State::waiting) votes |= fibers[i].value;
    for (std::size_t i = 0; i < count; ++i) {
        if (fibers[i].state != State::waiting) continue;
        if (fibers[i].place != fibers[0].place && fibers[0].state == State::waiting)
            stuck("threads meet at different __syncthreads");
        fibers[i].value = votes;
        fibers[i].state = State::ready;
        any = true;
    }
    of_block = new_meeting();
    return any;
}

void prepare(std::size_t number) {
    Fiber& fiber = fibers[number];
    const unsigned at = static_cast<unsigned>(number), row = at / block_size.x;
    fiber.thread = dim3(at % block_size.x, row % block_size.y, row / block_size.y);
    fiber.state = State::ready;
    if (!kKept || !begun[number]) begin(contexts[number], stack_of(number), kStack, entry);
    begun[number] = true;
    if (tsan_of[set][number] == nullptr) tsan_of[set][number] = new_tsan();
}

void run_block(std::size_t shared_bytes, std::uint64_t order) {
    shared_is_new = true;
    set = (set + 1) % kSets;
    dynamic = static_cast<char*>(std::malloc(shared_bytes == 0 ? 1 : shared_bytes));
    std::memset(dynamic, 0xff, shared_bytes);
    release(of_start);  // its memory is there before its threads are
    of_block = new_meeting();
    for (char*& meeting : of_warp) meeting = new_meeting();
    std::size_t turn[kMost];
    for (std::size_t i = 0; i < count; ++i) {
        turn[i] = i;
        prepare(i);
    }
    for (std::size_t left = count; left > 0;) {
        for (std::size_t i = count; order != 0 && i > 1; --i) {
            shuffle_state = shuffle_state * 6364136223846793005u + 1442695040888963407u + order;
            std::swap(turn[i - 1], turn[(shuffle_state >> 33) % i]);
        }
        bool any = false;
        for (std::size_t i = 0; i < count; ++i) {
            if (fibers[turn[i]].state != State::ready) continue;
            resume(turn[i]);
            left -= fibers[turn[i]].state == State::done;
            any = true;
        }
        if (left > 0 && !settle() && !any) stuck("its threads wait for each other");
    }
    dynamics.push_back(dynamic);
}

}  // namespace

std::uint64_t meet(Meeting meeting, unsigned mask, std::uint64_t value, unsigned source, const void* place) {
    const std::size_t number = running;
    Fiber& fiber = fibers[number];
    if (meeting != Meeting::barrier && (mask >> number % 32 & 1) == 0) stuck("a lane meets others whose mask lacks it");
    char* order = nullptr;  // a shuffle or a ballot makes none between accesses to memory
    if (meeting == Meeting::barrier) order = of_block;
    if (meeting == Meeting::warp) order = of_warp[number / 32];
    if (order != nullptr) release(order);
    fiber.meeting = meeting;
    fiber.mask = mask;
    fiber.value = value;
    fiber.source = source;
    fiber.place = place;
    fiber.state = State::waiting;
    give_turn(false);
    if (order != nullptr) acquire(order);
    return fiber.value;
}

void* dynamic_shared() {
    return dynamic;
}

void begin_shared(void* memory, std::size_t bytes) {
    if (!shared_is_new) return;
    shared_is_new = false;
    forget(static_cast<char*>(memory), (bytes + 7) / 8 * 8);
    spoil(memory, bytes);
}

void run(const Launch& launch, void (*kernel)(void*), void* call, std::uint64_t order) {
    static std::mutex mutex;
    const std::lock_guard<std::mutex> turn(mutex);
    count = static_cast<std::size_t>(launch.block.x) * launch.block.y * launch.block.z;
    if (count == 0 || count > kMost) {
        std::fprintf(stderr, "cuda_on_host: a block of %zu threads\n", count);
        std::abort();
    }
#if defined(__SSE2__)
    const unsigned mode = _mm_getcsr();  // a GPU knows no mode; fibers take theirs from here
    _mm_setcsr(0x1F80);
#endif
    if (stacks == nullptr)
        stacks = static_cast<char*>(mmap(nullptr, kSets * kMost * kStack, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    own_tsan();
    of_start = new_meeting();
    body = kernel;
    bound = call;
    block_size = launch.block;
    grid_size = launch.grid;
    for (unsigned z = 0; z < launch.grid.z; ++z)
        for (unsigned y = 0; y < launch.grid.y; ++y)
            for (unsigned x = 0; x < launch.grid.x; ++x) {
                block = dim3(x, y, z);
                run_block(launch.shared_bytes, order);
            }
    acquire(&of_end);  // only now: blocks know nothing of each other
    for (char* memory : dynamics) std::free(memory);
    dynamics.clear();
#if defined(__SSE2__)
    _mm_setcsr(mode);
#endif
}

}  // namespace cuda_on_host
