#include "base/isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace fedcore {

const char* name(Isa level) {
    switch (level) {
        case Isa::avx512:
            return "avx512";
        case Isa::avx2:
            return "avx2";
        default:
            return "baseline";
    }
}

Isa best_isa() {
#if defined(FEDCORE_X86_LEVELS)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c")) return Isa::baseline;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return Isa::avx512;
    return Isa::avx2;
#else
    return Isa::baseline;
#endif
}

namespace {

Isa chosen_isa() {
    const Isa best = best_isa();
    const char* wanted = std::getenv("FEDCORE_ISA");
    if (wanted == nullptr || *wanted == '\0') return best;
    for (const Isa level : {Isa::baseline, Isa::avx2, Isa::avx512})
        if (std::string(wanted) == name(level) && level <= best) return level;
    throw std::runtime_error("FEDCORE_ISA: expected one of the levels from baseline to " + std::string(name(best)) +
                             ", which this machine has, got " + wanted);
}

}  // namespace

Isa active_isa() {
    static const Isa level = chosen_isa();
    return level;
}

}  // namespace fedcore
