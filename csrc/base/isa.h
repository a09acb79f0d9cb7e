// Which instruction sets this machine has, and which one the kernels use.
#pragma once

namespace fedcore {

enum class Isa { baseline, avx2, avx512 };  // ascending; aarch64 has only `baseline`, which is NEON

const char* name(Isa level);

// The highest level that both this build and this machine have.
Isa best_isa();

// best_isa(), or the level that FEDCORE_ISA forces, read once at the first call. Throws std::runtime_error if
// that is unknown or not to be had.
Isa active_isa();

}  // namespace fedcore
