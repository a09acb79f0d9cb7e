// The processor's floating-point mode while native code runs.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#    include <xmmintrin.h>
#endif

namespace fedcore {

// IEEE defaults in this scope and thread; restores the caller's mode. A caller may have set flush-to-zero
// (torch.set_flush_denormal), which applies to its thread but not to the workers.
class IeeeMode {
  public:
#if defined(__SSE2__)
    IeeeMode() : before_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
    ~IeeeMode() { _mm_setcsr(before_); }
    IeeeMode(const IeeeMode&) = delete;
    IeeeMode& operator=(const IeeeMode&) = delete;

  private:
    unsigned before_;
#elif defined(__aarch64__)
    IeeeMode() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(before_));
        __asm__ volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}));
    }
    ~IeeeMode() { __asm__ volatile("msr fpcr, %0" : : "r"(before_)); }
    IeeeMode(const IeeeMode&) = delete;
    IeeeMode& operator=(const IeeeMode&) = delete;

  private:
    std::uint64_t before_;
#else
    IeeeMode() {}
#endif
};

}  // namespace fedcore
