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

namespace {

bool is_there([[maybe_unused]] Isa level) {
#if defined(FEDCORE_HAS_AVX2) || defined(FEDCORE_HAS_AVX512)
    __builtin_cpu_init();
    [[maybe_unused]] const bool avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma");
#endif
    switch (level) {
#if defined(FEDCORE_HAS_BASELINE)
        case Isa::baseline:
            return true;
#endif
#if defined(FEDCORE_HAS_AVX2)
        case Isa::avx2:
            return avx2;
#endif
#if defined(FEDCORE_HAS_AVX512)
        case Isa::avx512:
            return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
        default:
            return false;
    }
}

constexpr Isa kLevels[] = {Isa::avx512, Isa::avx2, Isa::baseline};

Isa chosen_isa() {
    const Isa best = best_isa();
    const char* wanted = std::getenv("FEDCORE_ISA");
    if (wanted == nullptr || *wanted == '\0') return best;
    std::string known;
    for (const Isa level : kLevels) {
        if (!is_there(level)) continue;
        if (std::string(wanted) == name(level)) return level;
        known += (known.empty() ? "" : ", ") + std::string(name(level));
    }
    throw std::runtime_error("FEDCORE_ISA: expected a level that this machine and this build have, " + known +
                             ", got " + wanted);
}

}  // namespace

Isa best_isa() {
    for (const Isa level : kLevels)
        if (is_there(level)) return level;
    throw std::runtime_error(
        "fedcore was compiled only for another machine's processor; compile it again on this machine");
}

Isa active_isa() {
    static const Isa level = chosen_isa();
    return level;
}

}  // namespace fedcore
