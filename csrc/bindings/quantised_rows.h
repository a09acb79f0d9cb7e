// Quantised rows from Python.
#pragma once

#include <string>

#include "base/blocks.h"
#include "bindings/arrays.h"
#include "kernels/quantise.h"

namespace fedcore::bindings {

inline Codec codec_of(const std::string& name) {
    if (name == "bf16") return Codec::bf16;
    if (name == "f16") return Codec::f16;
    if (name != "int8") raise("UnknownNameError", "codec: expected bf16, f16 or int8, got " + name);
    return Codec::int8;
}

// The dtypes of a codec's codes: as bits, or as the numbers that the bits encode.
inline const Dtypes& dtypes_of(Codec codec) {
    static const Dtypes kDue[] = {{"float32"}, {"uint16", "bfloat16"}, {"uint16", "float16"}, {"int8"}};
    return kDue[static_cast<int>(codec)];
}

inline bool has_scales(Codec codec, const py::object& scales, Name name) {
    if ((codec == Codec::int8) == scales.is_none())
        raise("ArrayError", name.text() + ": expected an array exactly where the codec is int8");
    return codec == Codec::int8;
}

// The position of a part's element 0 in the whole row. A loop has one key for a block (scalar/codes.inl).
inline std::int64_t checked_first(std::int64_t first, std::int64_t n) {
    constexpr std::int64_t kMost = std::int64_t{1} << 62;
    if (first < 0 || first > kMost || first % kCodeBlock != 0)
        raise("RangeError", "first: expected a multiple of 64 from 0 to 2^62, got " + std::to_string(first));
    if (first % kBlock != 0 && first >> 32 != (first + n) >> 32)
        raise("RangeError",
              "first: expected a multiple of 16,384 for a part that reaches past a multiple of 2^32, got " +
                  std::to_string(first));
    return first;
}

inline std::int64_t scale_count(std::int64_t n) {
    return (n + kCodeBlock - 1) / kCodeBlock;
}

}  // namespace fedcore::bindings
