// Compiled once per ISA level (isa.cmake), as kernels/isa_level.cpp is, and with the same rule: no inline function of
// a shared header.
#include <cstdint>
#include <cstring>

namespace fedcore::FEDCORE_LEVEL {

std::uint64_t checksum_block(const char* data, std::int64_t bytes);

#include "store/checksum_cpu.inl"

}  // namespace fedcore::FEDCORE_LEVEL
