// Compiled once per ISA level (isa.cmake), as kernels/isa_level.cpp is, and with the same rule: no inline function of
// a shared header.
#include <cstddef>
#include <cstdint>

#if defined(__AVX2__)
#    pragma GCC diagnostic push
#    pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // as in kernels/isa_level.cpp
#    include <immintrin.h>
#    pragma GCC diagnostic pop
#endif

namespace fedcore::FEDCORE_LEVEL {

std::uint64_t checksum_block(const char* data, std::int64_t bytes);

namespace {

#include "base/checksum_lanes.inl"

}  // namespace

#include "store/checksum_cpu.inl"

}  // namespace fedcore::FEDCORE_LEVEL
