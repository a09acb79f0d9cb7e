// The processor's floating-point mode while native code runs.
#pragma once

#if defined(__SSE2__)
#    include <xmmintrin.h>
#endif

namespace fedcore {

// IEEE defaults in this scope and thread, the caller's mode again behind it. A caller may have set flush-to-zero
// (torch.set_flush_denormal), which its own thread would obey and a worker would not.
class IeeeMode {
  public:
#if defined(__SSE2__)
    IeeeMode() : before_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
    ~IeeeMode() { _mm_setcsr(before_); }
    IeeeMode(const IeeeMode&) = delete;
    IeeeMode& operator=(const IeeeMode&) = delete;

  private:
    unsigned before_;
#else
    IeeeMode() {}
#endif
};

}  // namespace fedcore
