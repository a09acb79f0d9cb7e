// Compiled once per ISA level (isa.cmake), as kernels/isa_level.cpp is, and with the same rule: no inline function of
// a shared header.
#include <cstdint>

namespace fedcore::FEDCORE_LEVEL {

#include "base/chacha_cpu.inl"
#include "base/random_cpu.inl"

}  // namespace fedcore::FEDCORE_LEVEL
